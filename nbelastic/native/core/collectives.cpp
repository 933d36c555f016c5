#include "collectives.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

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
    constexpr const char* names[] = {
        "allreduce",         "reduce-scatter", "reduce-parts", "gather-parts", "allreduce-tree",
        "reduce-tree-parts", "broadcast",      "allgather",    "all-to-all",   "barrier",
        "share"};
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
    switch (operation.kind) {
        case Kind::allreduce: return allreduce(operation);
        case Kind::reduce_scatter: return reduce_parts(operation, false);
        case Kind::reduce_parts: return reduce_parts(operation, true);
        case Kind::gather_parts: return gather_parts(operation);
        case Kind::allreduce_tree: return allreduce_tree(operation);
        case Kind::reduce_tree_parts: return reduce_tree_parts(operation);
        case Kind::broadcast: return broadcast(operation);
        case Kind::allgather: return allgather(operation);
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
    const auto reduces = its.kind <= static_cast<std::uint32_t>(Kind::reduce_tree_parts);
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

bool Collectives::all_in_segment() const {
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        if (!is_in_segment(post(rank))) return false;
    }
    return true;
}

bool Collectives::any_in_segment() const {
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        if (is_in_segment(post(rank))) return true;
    }
    return false;
}

bool Collectives::is_small(std::size_t bytes) const {
    return bytes <= kSmallBytes && bytes * team_.size() <= 8 * kSmallBytes;
}

std::byte* Collectives::small(std::uint32_t rank) const { return segment_.small(rank, parity_); }

void Collectives::reduce(const Operation& operation, const std::vector<std::byte*>& outputs,
                         const std::vector<std::byte*>& inputs, std::size_t count) {
    const auto type = static_cast<std::uint32_t>(operation.type);
    const Reduce function = kernels().of[type][static_cast<std::uint32_t>(operation.op)];
    const std::size_t value = bytes_of(operation.type);
    std::vector<std::byte*> to = outputs;
    std::vector<std::byte*> from = inputs;
    for (std::size_t left = count; left > 0;) {
        team_.check();
        const std::size_t n = std::min(left, kStretch / value);
        function(to.data(), to.size(), from.data(), from.size(), n, team_.size());
        for (auto& each : to) each += n * value;
        for (auto& each : from) each += n * value;
        left -= n;
    }
}

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
        length_ = std::min(all_.all_in_segment() ? bytes_ : kHalf, bytes_ - first_);
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
    static constexpr std::size_t kHalf = kStagingBytes / 2;

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

void Collectives::allreduce(const Operation& operation) {
    const std::size_t bytes = operation.count * bytes_of(operation.type);
    if (is_small(bytes)) return allreduce_small(operation, bytes);
    const std::span<const Piece> values = operation.values();
    const std::int64_t where =
        values.size() == 1 ? segment_.place(team_.rank(), values[0].data, bytes) : -1;
    Parts from(values);
    const std::size_t first = std::min(kWindowBytes, bytes);
    if (where < 0) stage(operation, from, first, 0);
    publish(operation, where);
    if (all_in_segment()) return allreduce_in_place(operation);
    if (any_in_segment()) {
        if (where >= 0) stage(operation, from, first, 0);
        step();
    }
    allreduce_staged(operation, from, bytes);
}

void Collectives::allreduce_small(const Operation& operation, std::size_t bytes) {
    const std::span<const Piece> values = operation.values();
    Parts(values).read(small(team_.rank()), bytes);
    publish(operation, -1);
    const std::uint32_t size = team_.size();
    std::byte* inputs[kMostRanks];
    for (std::uint32_t rank = 0; rank < size; ++rank) inputs[rank] = small(rank);
    alignas(kLine) std::byte room[kSmallBytes];
    const bool whole = values.size() == 1;
    std::byte* output = whole ? values[0].data : room;
    const Reduce function = kernels().of[static_cast<std::uint32_t>(operation.type)]
                                        [static_cast<std::uint32_t>(operation.op)];
    function(&output, 1, inputs, size, operation.count, size);
    if (!whole) Parts(values).write(room, bytes);
}

void Collectives::allreduce_in_place(const Operation& operation) {
    const std::size_t value = bytes_of(operation.type);
    const Share share(operation.count, value, team_.rank(), team_.size());
    std::vector<std::byte*> buffers(team_.size());
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        buffers[rank] = segment_.base() + post(rank).where + share.first * value;
    }
    reduce(operation, buffers, buffers, share.count);
    step();
}

// One window after the other. Between two meetings of all ranks each reduces its share of a window,
// copies the result of the one before to its place, and stages what peers need of the next: the two
// halves of the staging memory are used in turn.
void Collectives::allreduce_staged(const Operation& operation, Parts& from, std::size_t bytes) {
    Parts own(operation.values());
    Parts home(operation.values());
    std::size_t first = 0;
    for (std::uint32_t turn = 0;; ++turn) {
        const std::size_t length = std::min(kWindowBytes, bytes - first);
        first += length;
        reduce_share(operation, own, length, turn);
        own.skip(length);
        if (turn > 0) take_home(operation, home, kWindowBytes, turn - 1);
        stage(operation, from, std::min(kWindowBytes, bytes - first), turn + 1);
        step();
        if (first == bytes) return take_home(operation, home, length, turn);
    }
}

std::byte* Collectives::staged(std::uint32_t rank, std::uint32_t turn) const {
    return segment_.staging(rank) + turn % 2 * (kStagingBytes / 2);
}

// Reduces this rank's share of a window: all others' in their staging memory, its own where it is.
void Collectives::reduce_share(const Operation& operation, Parts window, std::size_t bytes,
                               std::uint32_t turn) {
    const std::size_t value = bytes_of(operation.type);
    const std::uint32_t rank = team_.rank();
    const Share share(bytes / value, value, rank, team_.size());
    std::vector<std::byte*> inputs(team_.size());
    for (std::uint32_t each = 0; each < team_.size(); ++each) {
        inputs[each] = staged(each, turn) + share.first * value;
    }
    window.skip(share.first * value);
    window.walk(share.count * value, [&](std::byte* piece, std::size_t length) {
        inputs[rank] = piece;
        reduce(operation, inputs, inputs, length / value);
        for (auto& each : inputs) each += length;
    });
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
void Collectives::stage(const Operation& operation, Parts& from, std::size_t bytes,
                        std::uint32_t turn) {
    others_of(operation, from, bytes, staged(team_.rank(), turn),
              [&from](std::byte* to, std::size_t length) { from.read(to, length); });
}

// Copies what peers have reduced of the next `bytes` to its place.
void Collectives::take_home(const Operation& operation, Parts& to, std::size_t bytes,
                            std::uint32_t turn) {
    others_of(operation, to, bytes, staged(team_.rank(), turn),
              [&to](const std::byte* from, std::size_t length) { to.write(from, length); });
}

void Collectives::reduce_parts(const Operation& operation, bool in_place) {
    const std::size_t value = bytes_of(operation.type);
    const std::uint32_t rank = team_.rank();
    const std::size_t first = before(operation.counts, rank) * value;
    publish(operation, segment_.place(rank, operation.data, operation.count * value));
    std::vector<std::byte*> buffers(team_.size());
    for (std::uint32_t each = 0; each < team_.size(); ++each) {
        buffers[each] = segment_.base() + post(each).where + first;
    }
    std::byte* output = in_place ? operation.data + first : operation.output;
    reduce(operation, {output}, buffers, operation.counts[rank]);
    step();
}

void Collectives::gather_parts(const Operation& operation) {
    const std::size_t value = bytes_of(operation.type);
    publish(operation, segment_.place(team_.rank(), operation.data, operation.count * value));
    std::size_t first = 0;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        const std::size_t bytes = operation.counts[rank] * value;
        copy(operation.data + first, segment_.base() + post(rank).where + first, bytes);
        first += bytes;
    }
    step();
}

// -- sums along a tree ----------------------------------------------------------------------------

// As an allreduce, but that a rank may bring several values for each of the outcome, one for each of
// its nodes, or none.
void Collectives::allreduce_tree(const Operation& operation) {
    const InFloatMode mode(operation.mode);
    const Tree& tree = *operation.tree;
    const std::size_t bytes = operation.count * bytes_of(operation.type);
    std::copy(tree.leaves().begin(), tree.leaves().end(), segment_.letters(parity_, team_.rank()));
    if (is_small(bytes * tree.most())) return allreduce_tree_small(operation, bytes);
    const std::int64_t where = place_nodes(operation, bytes);
    std::vector<Parts> from = nodes_of(operation);
    const std::size_t first = std::min(tree_window(tree), bytes);
    if (where < 0) stage_nodes(operation, from, first, 0);
    publish(operation, where);
    if (all_in_segment()) return allreduce_tree_in_place(operation);
    if (any_in_segment()) {
        if (where >= 0) stage_nodes(operation, from, first, 0);
        step();
    }
    allreduce_tree_staged(operation, from, bytes);
}

// Tells the others where this rank's nodes are, if they and the output are in the segment, and
// returns where the output is. The memory for small values is free for that.
std::int64_t Collectives::place_nodes(const Operation& operation, std::size_t bytes) const {
    const std::uint32_t rank = team_.rank();
    if (operation.outputs.size() != 1) return -1;
    auto* places = reinterpret_cast<std::int64_t*>(small(rank));
    for (const Piece& node : operation.inputs) {
        *places = segment_.place(rank, node.data, bytes);
        if (*places++ < 0) return -1;
    }
    return segment_.place(rank, operation.outputs[0].data, bytes);
}

std::vector<Collectives::Parts> Collectives::nodes_of(const Operation& operation) const {
    const std::span<const Piece> pieces(operation.inputs);
    const std::size_t each = operation.outputs.size();
    std::vector<Parts> nodes;
    for (std::size_t first = 0; first < pieces.size(); first += each) {
        nodes.emplace_back(pieces.subspan(first, each));
    }
    return nodes;
}

void Collectives::allreduce_tree_small(const Operation& operation, std::size_t bytes) {
    const Tree& tree = *operation.tree;
    std::byte* to = small(team_.rank());
    for (Parts& node : nodes_of(operation)) {
        node.read(to, bytes);
        to += bytes;
    }
    publish(operation, -1);
    std::vector<std::byte*> inputs;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        for (std::uint32_t node = 0; node < tree.nodes(rank); ++node) {
            inputs.push_back(small(rank) + node * bytes);
        }
    }
    alignas(kLine) std::byte room[kSmallBytes];
    reduce_tree(operation, {room}, std::move(inputs), operation.count);
    Parts(operation.outputs).write(room, bytes);
}

void Collectives::allreduce_tree_in_place(const Operation& operation) {
    const std::size_t value = bytes_of(operation.type);
    const Share share(operation.count, value, team_.rank(), team_.size());
    std::byte* base = segment_.base() + share.first * value;
    std::vector<std::byte*> inputs, outputs;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        const auto* places = reinterpret_cast<const std::int64_t*>(small(rank));
        for (std::uint32_t node = 0; node < operation.tree->nodes(rank); ++node) {
            inputs.push_back(base + places[node]);
        }
        outputs.push_back(base + post(rank).where);
    }
    reduce_tree(operation, std::move(outputs), std::move(inputs), share.count);
    step();
}

// See allreduce_staged. The sum of a window is staged where a rank's first node is.
void Collectives::allreduce_tree_staged(const Operation& operation, std::vector<Parts>& from,
                                        std::size_t bytes) {
    std::vector<Parts> own = nodes_of(operation);
    Parts sums(operation.outputs);
    Parts home(operation.outputs);
    const std::size_t window = tree_window(*operation.tree);
    const auto take_sums_home = [&](std::size_t length, std::uint32_t turn) {
        others_of(operation, home, length, staged_node(*operation.tree, team_.rank(), turn, 0),
                  [&home](const std::byte* sum, std::size_t n) { home.write(sum, n); });
    };
    std::size_t first = 0;
    for (std::uint32_t turn = 0;; ++turn) {
        const std::size_t length = std::min(window, bytes - first);
        first += length;
        reduce_tree_share(operation, own, sums, length, turn);
        if (turn > 0) take_sums_home(window, turn - 1);
        stage_nodes(operation, from, std::min(window, bytes - first), turn + 1);
        step();
        if (first == bytes) return take_sums_home(length, turn);
    }
}

// Bytes of each node that are added at a time.
std::size_t Collectives::tree_window(const Tree& tree) const {
    if (tree.most() <= kTreeNodes) return kWindowBytes;
    return (kTreeStagingBytes / 2 / tree.most() - kTreeApart) / kLine * kLine;
}

std::byte* Collectives::staged_node(const Tree& tree, std::uint32_t rank, std::uint32_t turn,
                                    std::uint32_t node) const {
    std::byte* half = segment_.tree_staging(rank) + turn % 2 * (kTreeStagingBytes / 2);
    return half + node * (tree_window(tree) + kTreeApart);
}

void Collectives::stage_nodes(const Operation& operation, std::vector<Parts>& from,
                              std::size_t bytes, std::uint32_t turn) {
    std::uint32_t number = 0;
    for (Parts& node : from) {
        others_of(operation, node, bytes, staged_node(*operation.tree, team_.rank(), turn, number++),
                  [&node](std::byte* to, std::size_t length) { node.read(to, length); });
    }
}

// Adds this rank's share of a window: others' nodes in their staging memory, its own where they are.
void Collectives::reduce_tree_share(const Operation& operation, std::vector<Parts>& nodes,
                                    Parts& sums, std::size_t bytes, std::uint32_t turn) {
    const Tree& tree = *operation.tree;
    const std::size_t value = bytes_of(operation.type);
    const Share share(bytes / value, value, team_.rank(), team_.size());
    const std::size_t begin = share.first * value, length = share.count * value;
    std::vector<std::byte*> inputs, outputs;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        outputs.push_back(staged_node(tree, rank, turn, 0) + begin);
        for (std::uint32_t node = 0; node < tree.nodes(rank); ++node) {
            inputs.push_back(staged_node(tree, rank, turn, node) + begin);
        }
    }
    for (Parts& node : nodes) node.skip(begin);
    sums.skip(begin);
    for (std::size_t done = 0; done < length;) {
        const Piece sum = sums.take(length - done);
        outputs[team_.rank()] = sum.data;
        for (std::size_t node = 0; node < nodes.size(); ++node) {
            inputs[tree.first(team_.rank()) + node] = nodes[node].take(sum.bytes).data;
        }
        reduce_tree(operation, outputs, inputs, sum.bytes / value);
        for (auto& each : inputs) each += sum.bytes;
        for (auto& each : outputs) each += sum.bytes;
        done += sum.bytes;
    }
    for (Parts& node : nodes) node.skip(bytes - begin - length);
    sums.skip(bytes - begin - length);
}

// A rank's nodes lie one after the other in the segment; each result of its part goes to an output.
void Collectives::reduce_tree_parts(const Operation& operation) {
    const InFloatMode mode(operation.mode);
    const Tree& tree = *operation.tree;
    const std::uint32_t rank = team_.rank();
    const std::size_t value = bytes_of(operation.type);
    std::copy(tree.leaves().begin(), tree.leaves().end(), segment_.letters(parity_, rank));
    publish(operation, operation.data == nullptr ? 0 : operation.data - segment_.base());
    std::vector<std::byte*> inputs, outputs;
    for (std::uint32_t each = 0; each < team_.size(); ++each) {
        for (std::uint32_t node = 0; node < tree.nodes(each); ++node) {
            const std::size_t first = node * operation.count + before(operation.counts, rank);
            inputs.push_back(segment_.base() + post(each).where + first * value);
        }
    }
    for (const Piece& piece : operation.outputs) outputs.push_back(piece.data);
    reduce_tree(operation, std::move(outputs), std::move(inputs), operation.counts[rank]);
    step();
}

void Collectives::reduce_tree(const Operation& operation, std::vector<std::byte*> outputs,
                              std::vector<std::byte*> inputs, std::size_t count) {
    const ReduceTree function = kernels().along_tree[static_cast<std::uint32_t>(operation.type)];
    const Tree& tree = *operation.tree;
    const std::size_t value = bytes_of(operation.type);
    room_.resize(std::max(room_.size(), tree.deepest() * kTreeBlock + kLine));
    void* room = room_.data();
    std::size_t size = room_.size();
    std::align(kLine, tree.deepest() * kTreeBlock, room, size);
    for (std::size_t left = count; left > 0;) {
        team_.check();
        const std::size_t n = std::min(left, kStretch / value);
        function(outputs.data(), outputs.size(), inputs.data(), tree.order().data(), inputs.size(),
                 tree.results(), n, static_cast<std::byte*>(room));
        for (auto& each : outputs) each += n * value;
        for (auto& each : inputs) each += n * value;
        left -= n;
    }
}

// -- copies ---------------------------------------------------------------------------------------

void Collectives::broadcast(const Operation& operation) {
    const bool root = team_.rank() == operation.root;
    if (is_small(operation.count)) {
        if (root) copy_bytes(small(operation.root), operation.data, operation.count);
        publish(operation, -1);
        if (!root) copy_bytes(operation.data, small(operation.root), operation.count);
        return;
    }
    // Only the root's buffer is read, so only where that is decides.
    const std::int64_t where =
        root ? segment_.place(operation.root, operation.data, operation.count) : 0;
    Window window(*this, root ? operation.data : nullptr, operation.count, where >= 0 && root);
    publish(operation, where);
    for (; window.open(); window.close()) {
        if (!root) copy(operation.data + window.first(), window.of(operation.root), window.length());
    }
}

void Collectives::allgather(const Operation& operation) {
    const std::uint32_t rank = team_.rank();
    const std::size_t bytes = operation.count;
    if (is_small(bytes)) {
        copy_bytes(small(rank), operation.data, bytes);
        publish(operation, -1);
        for (std::uint32_t each = 0; each < team_.size(); ++each) {
            copy_bytes(operation.outputs[each].data, small(each), bytes);
        }
        return;
    }
    const std::int64_t where = segment_.place(rank, operation.data, bytes);
    Window window(*this, operation.data, bytes, where >= 0);
    publish(operation, where);
    for (; window.open(); window.close()) {
        for (std::uint32_t each = 0; each < team_.size(); ++each) {
            std::byte* to = operation.outputs[each].data + window.first();
            copy(to, each == rank ? operation.data + window.first() : window.of(each),
                 window.length());
        }
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
    const std::size_t part = kStagingBytes / size / kLine * kLine;
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
