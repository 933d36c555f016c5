#include "collectives.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "copy.hpp"

namespace nbelastic {
namespace {

constexpr std::size_t kStretch = 256 << 10;  // bytes between two looks whether all is over

// The part of `total` values that is a rank's to reduce; whole cache lines, but for the last.
struct Share {
    std::size_t first, count;
    Share(std::size_t total, std::size_t value_bytes, std::uint32_t rank, std::uint32_t size) {
        const std::size_t line = kLine / value_bytes;
        const std::size_t lines = (total + line - 1) / line;
        first = std::min(lines * rank / size * line, total);
        count = std::min(lines * (rank + 1) / size * line, total) - first;
    }
};

constexpr auto kShare = static_cast<std::uint32_t>(Kind::share);

const char* name_of(std::uint32_t kind) {
    constexpr const char* names[] = {"allreduce", "reduce-scatter", "gather-parts", "broadcast",
                                     "allgather", "all-to-all",     "barrier",      "share"};
    return kind < std::size(names) ? names[kind] : "?";
}

// Whether a rank's buffer is in the segment.
bool is_in_segment(const Post& post) { return post.where >= 0; }

std::size_t before(const std::vector<std::size_t>& counts, std::uint32_t rank) {
    return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
}

}  // namespace

void Collectives::perform(const Operation& operation, Patience patience) {
    patience_ = patience;
    parity_ ^= 1;
    std::optional<InFloatMode> mode;
    if (operation.tree != nullptr) {
        mode.emplace(operation.mode);
        const std::vector<std::uint32_t>& leaves = operation.tree->leaves();
        std::copy(leaves.begin(), leaves.end(), segment_.letters(parity_, team_.rank()));
    }
    switch (operation.kind) {
        case Kind::allreduce: return allreduce(operation);
        case Kind::reduce_scatter: return reduce_scatter(operation);
        case Kind::gather_parts: return gather_parts(operation);
        case Kind::broadcast:
        case Kind::allgather: return spread(operation);
        case Kind::all_to_all: return all_to_all(operation);
        case Kind::barrier: return publish(operation, -1);
        case Kind::share: return share(operation);
    }
}

// -- what all have in common ----------------------------------------------------------------------

void Collectives::publish(const Operation& operation, std::int64_t where, std::uint64_t rounds) {
    Post& own = segment_.seat(team_.rank()).posts[parity_];
    own = Post{static_cast<std::uint32_t>(operation.kind), static_cast<std::uint32_t>(operation.type),
               static_cast<std::uint32_t>(operation.op),   operation.root,
               operation.count,                            where,
               rounds,                                     operation.tree ? operation.tree->digest() : 0};
    step();
    agree(own);
}

void Collectives::agree(const Post& own) {
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        const Post& other = post(rank);
        const bool as_long = other.count == own.count || own.kind == kShare;
        if (other.kind == own.kind && other.type == own.type && other.op == own.op &&
            other.root == own.root && other.tree == own.tree && as_long) {
            continue;
        }
        team_.disagree(told(std::min(rank, team_.rank())) + ", " +
                       told(std::max(rank, team_.rank())));
    }
}

// What a rank is in, for people.
std::string Collectives::told(std::uint32_t rank) const {
    const Post& its = post(rank);
    std::string text = "rank " + std::to_string(rank) + " is in ";
    if (its.kind == kShare) {
        const auto* record = reinterpret_cast<const char*>(small(rank));
        const std::size_t length = std::min<std::size_t>(its.count, kSmallBytes);
        return text.append(record, strnlen(record, length));
    }
    text += name_of(its.kind);
    const auto reduces = its.kind <= static_cast<std::uint32_t>(Kind::gather_parts);
    if (reduces && its.type < kTypes && its.op < kOps) {
        text += std::string(" (") + kOpNames[its.op] + ") of " + std::to_string(its.count) + " " +
                kTypeNames[its.type] + " values";
        return its.tree == 0 ? text : text + " of blocks of " + leaves_of(rank) + " leaves";
    }
    if (its.root != 0) text += " from rank " + std::to_string(its.root);
    return its.count == 0 ? text : text + " of " + std::to_string(its.count) + " bytes";
}

// The leaves of each rank, as a rank has them.
std::string Collectives::leaves_of(std::uint32_t rank) const {
    std::string text;
    for (std::uint32_t each = 0; each < team_.size(); ++each) {
        if (each > 0) text += ", ";
        text += std::to_string(segment_.letters(parity_, rank)[each]);
    }
    return text;
}

const Post& Collectives::post(std::uint32_t rank) const { return segment_.seat(rank).posts[parity_]; }

// How many ranks have their buffers in the segment.
std::uint32_t Collectives::in_segment() const {
    std::uint32_t found = 0;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) found += is_in_segment(post(rank));
    return found;
}

bool Collectives::is_small(std::size_t bytes) const {
    return bytes <= kSmallBytes && bytes * team_.size() <= 8 * kSmallBytes;
}

std::byte* Collectives::small(std::uint32_t rank) const { return segment_.small(rank, parity_); }

void Collectives::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to == from) return;
    for (std::size_t done = 0; done < bytes; done += kStretch) {
        team_.check();
        copy_bytes(to + done, from + done, std::min(kStretch, bytes - done));
    }
}

// Memory in several pieces, which is read, or written, from its beginning to its end.
class Collectives::Parts {
public:
    explicit Parts(std::span<const Piece> pieces) : piece_(pieces.data()) {}

    void read(std::byte* to, std::size_t bytes) {
        walk(bytes, [&to](std::byte* piece, std::size_t length) {
            copy_bytes(to, piece, length);
            to += length;
        });
    }
    void write(const std::byte* from, std::size_t bytes) {
        walk(bytes, [&from](std::byte* piece, std::size_t length) {
            copy_bytes(piece, from, length);
            from += length;
        });
    }
    void skip(std::size_t bytes) {
        walk(bytes, [](std::byte*, std::size_t) {});
    }

    // Calls `each` with what lies together of the next `bytes`.
    template <class Each>
    void walk(std::size_t bytes, Each each) {
        while (bytes > 0) {
            const Piece next = take(bytes);
            each(next.data, next.bytes);
            bytes -= next.bytes;
        }
    }

    // Passes what lies together of the next `bytes`, and returns it.
    Piece take(std::size_t bytes) {
        const Piece next{piece_->data + done_, std::min(bytes, piece_->bytes - done_)};
        done_ += next.bytes;
        if (done_ == piece_->bytes) {
            ++piece_;
            done_ = 0;
        }
        return next;
    }

private:
    const Piece* piece_;
    std::size_t done_ = 0;  // of this piece
};

// What all ranks read of each other, one stretch after the other: all at once, where it is in the
// segment. What is not goes through staging memory, of which one half is filled while the other is
// read.
class Collectives::Window {
public:
    // Before the post. Ranks that have no `data` have nothing to be read.
    Window(Collectives& all, std::byte* data, std::size_t bytes, bool in_segment)
        : all_(all), data_(in_segment ? nullptr : data), bytes_(bytes) {
        stage(0);
    }

    // After it, and for each stretch.
    bool open() {
        if (first_ >= bytes_) return false;
        length_ = std::min(all_.in_segment() == all_.team_.size() ? bytes_ : kHalf, bytes_ - first_);
        stage(first_ + length_);
        return true;
    }
    std::size_t length() const { return length_; }
    std::size_t first() const { return first_; }

    const std::byte* of(std::uint32_t rank) const {
        const Post& post = all_.post(rank);
        if (!is_in_segment(post)) return half(rank, first_);
        return all_.segment_.base() + post.where + first_;
    }

    // When it has been read.
    void close() {
        first_ += length_;
        all_.step();
    }

private:
    static constexpr std::size_t kHalf = kWindowBytes;

    std::byte* half(std::uint32_t rank, std::size_t first) const {
        return all_.segment_.staging(rank) + first / kHalf % 2 * kHalf;
    }
    void stage(std::size_t first) {
        if (data_ == nullptr || first >= bytes_) return;
        const std::size_t length = std::min(kHalf, bytes_ - first);
        all_.copy(half(all_.team_.rank(), first), data_ + first, length);
    }

    Collectives& all_;
    std::byte* data_;
    std::size_t bytes_;
    std::size_t first_ = 0;
    std::size_t length_ = 0;
};

// -- reductions -----------------------------------------------------------------------------------

// A rank brings one value for each of the outcome; along a tree several, one for each of its nodes,
// or none.
void Collectives::allreduce(const Operation& operation) {
    const std::size_t bytes = operation.count * bytes_of(operation.type);
    if (is_small(bytes * operation.most())) return allreduce_small(operation, bytes);
    const std::int64_t where = place_nodes(operation, bytes);
    std::vector<Parts> from = nodes_of(operation);
    const std::size_t first = std::min(window_of(operation), bytes);
    if (where < 0) stage(operation, from, first, 0);
    publish(operation, where);
    if (in_segment() == team_.size()) return allreduce_in_place(operation);
    if (in_segment() > 0) {
        if (where >= 0) stage(operation, from, first, 0);
        step();
    }
    allreduce_staged(operation, from, bytes);
}

// Tells the others where this rank's nodes are, if they and the outcome are in the segment, and
// returns where the outcome is. The memory for small values is free for that.
std::int64_t Collectives::place_nodes(const Operation& operation, std::size_t bytes) const {
    const std::uint32_t rank = team_.rank();
    if (operation.outcome().size() != 1) return -1;
    auto* places = reinterpret_cast<std::int64_t*>(small(rank));
    for (const Piece& node : operation.inputs) {
        *places = segment_.place(rank, node.data, bytes);
        if (*places++ < 0) return -1;
    }
    return segment_.place(rank, operation.outcome()[0].data, bytes);
}

std::vector<Collectives::Parts> Collectives::nodes_of(const Operation& operation) const {
    const std::span<const Piece> pieces(operation.inputs);
    const std::size_t each = operation.outcome().size();
    std::vector<Parts> nodes;
    for (std::size_t first = 0; first < pieces.size(); first += each) {
        nodes.emplace_back(pieces.subspan(first, each));
    }
    return nodes;
}

void Collectives::allreduce_small(const Operation& operation, std::size_t bytes) {
    const std::uint32_t rank = team_.rank();
    Parts(operation.inputs).read(small(rank), operation.nodes(rank) * bytes);
    publish(operation, -1);
    take_inputs(operation, [&](std::uint32_t each, std::uint32_t node) {
        return small(each) + node * bytes;
    });
    alignas(kLine) std::byte room[kSmallBytes];
    const std::span<const Piece> outcome = operation.outcome();
    const bool whole = outcome.size() == 1;
    outputs_.assign(1, whole ? outcome[0].data : room);
    combine(operation, operation.count);
    if (!whole) Parts(outcome).write(room, bytes);
}

void Collectives::allreduce_in_place(const Operation& operation) {
    const std::size_t value = bytes_of(operation.type);
    const Share share(operation.count, value, team_.rank(), team_.size());
    std::byte* base = segment_.base() + share.first * value;
    take_inputs(operation, [&](std::uint32_t rank, std::uint32_t node) {
        return base + reinterpret_cast<const std::int64_t*>(small(rank))[node];
    });
    take_outputs([&](std::uint32_t rank) { return base + post(rank).where; });
    combine(operation, share.count);
    step();
}

// One window after the other. Between two meetings of all ranks each reduces its share of a window,
// copies the result of the one before to its place, and stages what peers need of the next: the two
// halves of the staging memory are used in turn. The result of a window is staged where a rank's
// first node is.
void Collectives::allreduce_staged(const Operation& operation, std::vector<Parts>& from,
                                   std::size_t bytes) {
    std::vector<Parts> own = nodes_of(operation);
    Parts results(operation.outcome());
    Parts home(operation.outcome());
    const std::size_t window = window_of(operation);
    const auto take_home = [&](std::size_t length, std::uint32_t turn) {
        others_of(operation, home, length, staged(operation, team_.rank(), turn, 0),
                  [&home](const std::byte* result, std::size_t n) { home.write(result, n); });
    };
    std::size_t first = 0;
    for (std::uint32_t turn = 0;; ++turn) {
        const std::size_t length = std::min(window, bytes - first);
        first += length;
        reduce_share(operation, own, results, length, turn);
        if (turn > 0) take_home(window, turn - 1);
        stage(operation, from, std::min(window, bytes - first), turn + 1);
        step();
        if (first == bytes) return take_home(length, turn);
    }
}

// Bytes of each node that are reduced at a time.
std::size_t Collectives::window_of(const Operation& operation) const {
    if (operation.most() <= kStagedNodes) return kWindowBytes;
    return (kStagingBytes / 2 / operation.most() - kStagedApart) / kLine * kLine;
}

std::byte* Collectives::staged(const Operation& operation, std::uint32_t rank, std::uint32_t turn,
                               std::uint32_t node) const {
    std::byte* half = segment_.staging(rank) + turn % 2 * (kStagingBytes / 2);
    return half + node * (window_of(operation) + kStagedApart);
}

// Walks along a window, but for this rank's share of it; `each` is told where others' are staged.
template <class Each>
void Collectives::others_of(const Operation& operation, Parts& window, std::size_t bytes,
                            std::byte* staging, Each each) {
    team_.check();
    const std::size_t value = bytes_of(operation.type);
    const Share share(bytes / value, value, team_.rank(), team_.size());
    const std::size_t begin = share.first * value, end = begin + share.count * value;
    each(staging, begin);
    window.skip(end - begin);
    each(staging + end, bytes - end);
}

// Brings to staging memory what other ranks are to reduce of the next `bytes`.
void Collectives::stage(const Operation& operation, std::vector<Parts>& from, std::size_t bytes,
                        std::uint32_t turn) {
    std::uint32_t number = 0;
    for (Parts& node : from) {
        others_of(operation, node, bytes, staged(operation, team_.rank(), turn, number++),
                  [&node](std::byte* to, std::size_t length) { node.read(to, length); });
    }
}

// Reduces this rank's share of a window: others' nodes in their staging memory, its own where they
// are.
void Collectives::reduce_share(const Operation& operation, std::vector<Parts>& nodes,
                               Parts& results, std::size_t bytes, std::uint32_t turn) {
    const std::size_t value = bytes_of(operation.type);
    const std::uint32_t own = team_.rank();
    const Share share(bytes / value, value, own, team_.size());
    const std::size_t begin = share.first * value, length = share.count * value;
    take_inputs(operation, [&](std::uint32_t rank, std::uint32_t node) {
        return staged(operation, rank, turn, node) + begin;
    });
    take_outputs([&](std::uint32_t rank) { return staged(operation, rank, turn, 0) + begin; });
    for (Parts& node : nodes) node.skip(begin);
    results.skip(begin);
    for (std::size_t done = 0; done < length;) {
        const Piece result = results.take(length - done);
        outputs_[own] = result.data;
        for (std::size_t node = 0; node < nodes.size(); ++node) {
            inputs_[operation.first(own) + node] = nodes[node].take(result.bytes).data;
        }
        combine(operation, result.bytes / value);
        done += result.bytes;
    }
    for (Parts& node : nodes) node.skip(bytes - begin - length);
    results.skip(bytes - begin - length);
}

// A rank's nodes lie one after the other in the segment; each result of its part goes to an output.
void Collectives::reduce_scatter(const Operation& operation) {
    const std::uint32_t own = team_.rank();
    const std::size_t value = bytes_of(operation.type);
    publish(operation, operation.data == nullptr ? 0 : operation.data - segment_.base());
    take_inputs(operation, [&](std::uint32_t rank, std::uint32_t node) {
        const std::size_t first = node * operation.count + before(operation.counts, own);
        return segment_.base() + post(rank).where + first * value;
    });
    outputs_.clear();
    for (const Piece& piece : operation.outputs) outputs_.push_back(piece.data);
    combine(operation, operation.counts[own]);
    step();
}

void Collectives::gather_parts(const Operation& operation) {
    const std::size_t value = bytes_of(operation.type);
    publish(operation, operation.data - segment_.base());
    std::size_t first = 0;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        const std::size_t bytes = operation.counts[rank] * value;
        copy(operation.data + first, segment_.base() + post(rank).where + first, bytes);
        first += bytes;
    }
    step();
}

// Lists where each node of each rank is.
template <class Where>
void Collectives::take_inputs(const Operation& operation, Where where) {
    inputs_.clear();
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        for (std::uint32_t node = 0; node < operation.nodes(rank); ++node) {
            inputs_.push_back(where(rank, node));
        }
    }
}

// Lists where the outcome is to be on each rank.
template <class Where>
void Collectives::take_outputs(Where where) {
    outputs_.clear();
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) outputs_.push_back(where(rank));
}

// Reduces the next `count` values of all inputs to all outputs, and passes them.
void Collectives::combine(const Operation& operation, std::size_t count) {
    const auto type = static_cast<std::uint32_t>(operation.type);
    const Reduce flat = kernels().of[type][static_cast<std::uint32_t>(operation.op)];
    const ReduceTree along = kernels().along_tree[type];
    const Tree* tree = operation.tree.get();
    const std::size_t value = bytes_of(operation.type);
    void* room = nullptr;
    if (tree != nullptr) {
        room_.resize(std::max(room_.size(), tree->deepest() * kTreeBlock + kLine));
        room = room_.data();
        std::size_t size = room_.size();
        std::align(kLine, tree->deepest() * kTreeBlock, room, size);
    }
    for (std::size_t left = count; left > 0;) {
        team_.check();
        const std::size_t n = std::min(left, kStretch / value);
        if (tree == nullptr) {
            flat(outputs_.data(), outputs_.size(), inputs_.data(), inputs_.size(), n, team_.size());
        } else {
            along(outputs_.data(), outputs_.size(), inputs_.data(), tree->order().data(),
                  inputs_.size(), tree->results(), n, static_cast<std::byte*>(room));
        }
        for (auto& each : outputs_) each += n * value;
        for (auto& each : inputs_) each += n * value;
        left -= n;
    }
}

// -- copies ---------------------------------------------------------------------------------------

// What the root has for all, or each rank: only where their memory is decides.
void Collectives::spread(const Operation& operation) {
    const std::uint32_t rank = team_.rank();
    const bool by_all = operation.kind == Kind::allgather;
    const bool gives = by_all || rank == operation.root;
    const std::size_t bytes = operation.count;
    const auto take = [&](std::size_t first, std::size_t length, auto from) {
        for (std::uint32_t each = 0; each < team_.size(); ++each) {
            if (!by_all && each != operation.root) continue;
            std::byte* to = by_all ? operation.outputs[each].data : operation.data;
            copy(to + first, each == rank ? operation.data + first : from(each), length);
        }
    };
    if (is_small(bytes)) {
        if (gives) copy_bytes(small(rank), operation.data, bytes);
        publish(operation, -1);
        return take(0, bytes, [&](std::uint32_t each) { return small(each); });
    }
    const std::int64_t where = gives ? segment_.place(rank, operation.data, bytes) : 0;
    Window window(*this, gives ? operation.data : nullptr, bytes, gives && where >= 0);
    publish(operation, where);
    for (; window.open(); window.close()) {
        take(window.first(), window.length(), [&](std::uint32_t each) { return window.of(each); });
    }
}

// The records may be of any lengths, but short.
void Collectives::share(const Operation& operation) {
    copy_bytes(small(team_.rank()), operation.data, operation.count);
    publish(operation, -1);
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        const std::size_t length = std::min<std::size_t>(post(rank).count, kSmallBytes);
        operation.records[rank].assign(reinterpret_cast<const char*>(small(rank)), length);
    }
}

// Each rank's staging memory has a part for each other rank; rounds until all have all.
void Collectives::all_to_all(const Operation& operation) {
    const std::uint32_t rank = team_.rank();
    const std::uint32_t size = team_.size();
    const std::size_t part = 2 * kWindowBytes / size / kLine * kLine;
    std::size_t longest = 0;
    for (std::uint32_t to = 0; to < size; ++to) {
        const Piece& piece = operation.inputs[to];
        segment_.letters(parity_, rank)[to] = piece.bytes;
        if (to != rank) longest = std::max(longest, piece.bytes);
    }
    const auto fill = [&](std::size_t first) {
        for (std::uint32_t to = 0; to < size; ++to) {
            const Piece& piece = operation.inputs[to];
            if (to == rank || piece.bytes <= first) continue;
            copy(segment_.staging(rank) + to * part, piece.data + first,
                 std::min(part, piece.bytes - first));
        }
    };
    fill(0);
    publish(operation, -1, (longest + part - 1) / part);
    std::uint64_t rounds = 0;
    for (std::uint32_t source = 0; source < size; ++source) {
        rounds = std::max(rounds, post(source).rounds);
        if (segment_.letters(parity_, source)[rank] != operation.outputs[source].bytes) {
            team_.disagree("rank " + std::to_string(source) + " sends " +
                           std::to_string(segment_.letters(parity_, source)[rank]) +
                           " bytes, rank " + std::to_string(rank) + " expects " +
                           std::to_string(operation.outputs[source].bytes));
        }
    }
    team_.check();
    copy(operation.outputs[rank].data, operation.inputs[rank].data, operation.inputs[rank].bytes);
    for (std::uint64_t round = 0; round < rounds; ++round) {
        const std::size_t first = round * part;
        if (round > 0) {
            fill(first);
            step();
        }
        for (std::uint32_t source = 0; source < size; ++source) {
            const Piece& piece = operation.outputs[source];
            if (source == rank || piece.bytes <= first) continue;
            copy(piece.data + first, segment_.staging(source) + rank * part,
                 std::min(part, piece.bytes - first));
        }
        step();
    }
}

}  // namespace nbelastic
