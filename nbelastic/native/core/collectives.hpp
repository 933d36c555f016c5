// Collectives over a segment: what each does, step by step.
//
// Each begins with a post, by which a rank says what it is about to do and where its buffer is,
// and a step. After it each rank knows that all do the same; if not, the segment is broken.
//
// Small buffers travel with the post: each rank reads all of them, and nothing follows. The slots
// are used in turns: a rank that writes one again has seen all arrive at the collective between.
// Larger ones are reduced where they are, if they are in the segment: each rank reduces its share of
// all buffers, and writes it to all of them; a step says that all have. What is not in the segment
// goes through the rank's staging memory, window by window, in the same way: of an allreduce, which
// may be of values in many places, only the share of peers; the rank's own is reduced where it is.
#pragma once

#include <numeric>
#include <span>

#include "copy.hpp"
#include "team.hpp"
#include "tree.hpp"

namespace nbelastic {

enum class Kind : std::uint32_t {
    allreduce,
    reduce_scatter,
    gather_parts,
    broadcast,
    allgather,
    all_to_all,
    barrier,
    share,
};
inline constexpr const char* kKindNames[] = {"allreduce", "reduce-scatter", "gather-parts", "broadcast",
                                             "allgather", "all-to-all",     "barrier",      "share"};

struct Piece {
    std::byte* data;
    std::size_t bytes;
};

// One collective, as one rank asks for it. What is not used is empty.
struct Operation {
    Kind kind = Kind::barrier;
    Type type = Type::u8;
    Op op = Op::sum;
    std::uint32_t root = 0;
    std::byte* data = nullptr;
    std::size_t count = 0;  // values of `type`
    std::vector<std::size_t> counts{};  // values in the part of each rank
    std::vector<Piece> outputs{};
    std::vector<Piece> inputs{};
    std::span<std::string> records{};  // of a share: one for each rank, to be filled
    // Of a sum along a tree: pieces of `outputs`, and as long ones of each node in `inputs`.
    std::shared_ptr<const Tree> tree{};

    // How many nodes a rank has: values for each of the outcome. In an order, `first` is its first.
    std::uint32_t nodes(std::uint32_t rank) const { return tree ? tree->nodes(rank) : 1; }
    std::uint32_t first(std::uint32_t rank) const { return tree ? tree->first(rank) : rank; }
    std::uint32_t most() const { return tree ? tree->most() : 1; }

    // Where the outcome of an allreduce goes: without a tree, where the values were.
    std::span<const Piece> outcome() const { return tree ? outputs : inputs; }

    std::size_t value_bytes() const { return bytes_of(type); }
};

// Memory in several pieces, which is read, or written, from its beginning to its end.
class Cursor {
public:
    explicit Cursor(std::span<const Piece> pieces) : piece_(pieces.data()) {}

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
    template <class Each>
    void walk(std::size_t bytes, Each each) {
        while (bytes > 0) {
            const Piece next = take(bytes);
            each(next.data, next.bytes);
            bytes -= next.bytes;
        }
    }

    const Piece* piece_;
    std::size_t done_ = 0;  // of this piece
};

class Collectives {
public:
    explicit Collectives(Team& team) : team_(team), segment_(team.segment()) {}

    // Does it, and throws Broken if that cannot be. One thread at a time, the same on all ranks.
    void perform(const Operation& operation, Patience patience) {
        patience_ = patience;
        parity_ ^= 1;
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

private:
    static constexpr std::size_t kStretch = 256 << 10;  // bytes between two looks whether all is over
    static constexpr auto kShare = static_cast<std::uint32_t>(Kind::share);

    // -- what all have in common ------------------------------------------------------------------

    void publish(const Operation& operation, std::int64_t where, std::uint64_t rounds = 0) {
        Post& own = segment_.seat(team_.rank()).posts[parity_];
        own = Post{.kind = static_cast<std::uint32_t>(operation.kind),
                   .type = static_cast<std::uint32_t>(operation.type),
                   .op = static_cast<std::uint32_t>(operation.op),
                   .root = operation.root,
                   .count = operation.count,
                   .where = where,
                   .rounds = rounds,
                   .tree = operation.tree ? operation.tree->digest() : 0};
        step();
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
    std::string told(std::uint32_t rank) const {
        const Post& its = post(rank);
        std::string text = "rank " + std::to_string(rank) + " is in ";
        if (its.kind == kShare) {
            const auto* record = reinterpret_cast<const char*>(small(rank));
            const std::size_t length = std::min<std::size_t>(its.count, kSmallBytes);
            return text.append(record, strnlen(record, length));
        }
        text += its.kind < std::size(kKindNames) ? kKindNames[its.kind] : "?";
        const auto reduces = its.kind <= static_cast<std::uint32_t>(Kind::gather_parts);
        if (reduces && its.type < kTypes && its.op < kOps) {
            text += std::string(" (") + kOpNames[its.op] + ") of " + std::to_string(its.count) + " " +
                    kTypeNames[its.type] + " values";
            return its.tree == 0 ? text : text + " along tree " + std::to_string(its.tree % 100000);
        }
        if (its.root != 0) text += " from rank " + std::to_string(its.root);
        return its.count == 0 ? text : text + " of " + std::to_string(its.count) + " bytes";
    }

    const Post& post(std::uint32_t rank) const { return segment_.seat(rank).posts[parity_]; }

    // How many ranks have their buffers in the segment.
    std::uint32_t in_segment() const {
        std::uint32_t found = 0;
        for (std::uint32_t rank = 0; rank < team_.size(); ++rank) found += post(rank).where >= 0;
        return found;
    }

    bool is_small(std::size_t bytes) const {
        return bytes <= kSmallBytes && bytes * team_.size() <= 8 * kSmallBytes;
    }

    std::byte* small(std::uint32_t rank) const { return segment_.small(rank, parity_); }

    void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
        if (to == from) return;
        for (std::size_t done = 0; done < bytes; done += kStretch) {
            team_.check();
            copy_bytes(to + done, from + done, std::min(kStretch, bytes - done));
        }
    }

    void step() { team_.step(patience_); }

    // -- reductions -------------------------------------------------------------------------------

    // The part of so many bytes that is this rank's to reduce; whole cache lines, but for the last.
    struct Share {
        std::size_t begin, length;
    };
    Share share_of(std::size_t bytes) const {
        const std::size_t lines = (bytes + kLine - 1) / kLine;
        const auto first_of = [&](std::uint32_t rank) {
            return std::min(lines * rank / team_.size() * kLine, bytes);
        };
        const std::size_t begin = first_of(team_.rank());
        return {begin, first_of(team_.rank() + 1) - begin};
    }

    // A rank brings one value for each of the outcome; along a tree several, one for each of its
    // nodes, or none.
    void allreduce(const Operation& operation) {
        const std::size_t bytes = operation.count * operation.value_bytes();
        if (is_small(bytes * operation.most())) return allreduce_small(operation, bytes);
        const std::int64_t where = place_nodes(operation, bytes);
        std::vector<Cursor> from = nodes_of(operation);
        const std::size_t first = std::min(window_of(operation), bytes);
        if (where < 0) stage(operation, from, first, 0);
        publish(operation, where);
        if (in_segment() == team_.size()) return allreduce_in_place(operation, bytes);
        if (in_segment() > 0) {
            if (where >= 0) stage(operation, from, first, 0);
            step();
        }
        allreduce_staged(operation, from, bytes);
    }

    // Tells the others where this rank's nodes are, if they and the outcome are in the segment, and
    // returns where the outcome is. The memory for small values is free for that.
    std::int64_t place_nodes(const Operation& operation, std::size_t bytes) const {
        const std::uint32_t rank = team_.rank();
        if (operation.outcome().size() != 1) return -1;
        auto* places = reinterpret_cast<std::int64_t*>(small(rank));
        for (const Piece& node : operation.inputs) {
            *places = segment_.place(rank, node.data, bytes);
            if (*places++ < 0) return -1;
        }
        return segment_.place(rank, operation.outcome()[0].data, bytes);
    }

    static std::vector<Cursor> nodes_of(const Operation& operation) {
        const std::span<const Piece> pieces(operation.inputs);
        const std::size_t each = operation.outcome().size();
        std::vector<Cursor> nodes;
        for (std::size_t first = 0; first < pieces.size(); first += each) {
            nodes.emplace_back(pieces.subspan(first, each));
        }
        return nodes;
    }

    void allreduce_small(const Operation& operation, std::size_t bytes) {
        const std::uint32_t rank = team_.rank();
        Cursor(operation.inputs).read(small(rank), operation.nodes(rank) * bytes);
        publish(operation, -1);
        take_inputs(operation, [&](std::uint32_t each, std::uint32_t node) {
            return small(each) + node * bytes;
        });
        alignas(kLine) std::byte room[kSmallBytes];
        const std::span<const Piece> outcome = operation.outcome();
        const bool whole = outcome.size() == 1;
        outputs_.assign(1, whole ? outcome[0].data : room);
        combine(operation, operation.count);
        if (!whole) Cursor(outcome).write(room, bytes);
    }

    void allreduce_in_place(const Operation& operation, std::size_t bytes) {
        const auto [begin, length] = share_of(bytes);
        std::byte* base = segment_.base() + begin;
        take_inputs(operation, [&](std::uint32_t rank, std::uint32_t node) {
            return base + reinterpret_cast<const std::int64_t*>(small(rank))[node];
        });
        take_outputs([&](std::uint32_t rank) { return base + post(rank).where; });
        combine(operation, length / operation.value_bytes());
        step();
    }

    // One window after the other. Between two meetings of all ranks each reduces its share of a
    // window, copies the result of the one before to its place, and stages what peers need of the
    // next: the two halves of the staging memory are used in turn. The result of a window is staged
    // where a rank's first node is.
    void allreduce_staged(const Operation& operation, std::vector<Cursor>& from, std::size_t bytes) {
        std::vector<Cursor> own = nodes_of(operation);
        Cursor results(operation.outcome());
        Cursor home(operation.outcome());
        const std::size_t window = window_of(operation);
        const auto take_home = [&](std::size_t length, std::uint32_t turn) {
            others_of(home, length, staged(operation, team_.rank(), turn, 0),
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
    static std::size_t window_of(const Operation& operation) {
        if (operation.most() <= kStagedNodes) return kWindowBytes;
        return (kStagingBytes / 2 / operation.most() - kApart) / kLine * kLine;
    }

    std::byte* staged(const Operation& operation, std::uint32_t rank, std::uint32_t turn,
                      std::uint32_t node) const {
        std::byte* half = segment_.staging(rank) + turn % 2 * (kStagingBytes / 2);
        return half + node * (window_of(operation) + kApart);
    }

    // Walks along a window, but for this rank's share of it; `each` is told where others' are staged.
    template <class Each>
    void others_of(Cursor& window, std::size_t bytes, std::byte* staging, Each each) {
        team_.check();
        const auto [begin, length] = share_of(bytes);
        each(staging, begin);
        window.skip(length);
        each(staging + begin + length, bytes - begin - length);
    }

    // Brings to staging memory what other ranks are to reduce of the next `bytes`.
    void stage(const Operation& operation, std::vector<Cursor>& from, std::size_t bytes,
               std::uint32_t turn) {
        std::uint32_t number = 0;
        for (Cursor& node : from) {
            others_of(node, bytes, staged(operation, team_.rank(), turn, number++),
                      [&node](std::byte* to, std::size_t length) { node.read(to, length); });
        }
    }

    // Reduces this rank's share of a window: others' nodes in their staging memory, its own where
    // they are.
    void reduce_share(const Operation& operation, std::vector<Cursor>& nodes, Cursor& results,
                      std::size_t bytes, std::uint32_t turn) {
        const std::uint32_t own = team_.rank();
        const auto [begin, length] = share_of(bytes);
        const auto skip = [&](std::size_t skipped) {
            for (Cursor& node : nodes) node.skip(skipped);
            results.skip(skipped);
        };
        take_inputs(operation, [&, first = begin](std::uint32_t rank, std::uint32_t node) {
            return staged(operation, rank, turn, node) + first;
        });
        take_outputs([&, first = begin](std::uint32_t rank) {
            return staged(operation, rank, turn, 0) + first;
        });
        skip(begin);
        for (std::size_t done = 0; done < length;) {
            const Piece result = results.take(length - done);
            outputs_[own] = result.data;
            for (std::size_t node = 0; node < nodes.size(); ++node) {
                inputs_[operation.first(own) + node] = nodes[node].take(result.bytes).data;
            }
            combine(operation, result.bytes / operation.value_bytes());
            done += result.bytes;
        }
        skip(bytes - begin - length);
    }

    // A rank's nodes lie one after the other in the segment; each result of its part goes to an output.
    void reduce_scatter(const Operation& operation) {
        const std::vector<std::size_t>& counts = operation.counts;
        const std::uint32_t own = team_.rank();
        publish(operation, operation.data == nullptr ? 0 : operation.data - segment_.base());
        const std::size_t first = std::accumulate(counts.begin(), counts.begin() + own, std::size_t{0});
        take_inputs(operation, [&](std::uint32_t rank, std::uint32_t node) {
            const std::size_t at = (node * operation.count + first) * operation.value_bytes();
            return segment_.base() + post(rank).where + at;
        });
        outputs_.clear();
        for (const Piece& piece : operation.outputs) outputs_.push_back(piece.data);
        combine(operation, counts[own]);
        step();
    }

    void gather_parts(const Operation& operation) {
        publish(operation, operation.data - segment_.base());
        std::size_t first = 0;
        for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
            const std::size_t bytes = operation.counts[rank] * operation.value_bytes();
            copy(operation.data + first, segment_.base() + post(rank).where + first, bytes);
            first += bytes;
        }
        step();
    }

    // Lists where each node of each rank is.
    template <class Where>
    void take_inputs(const Operation& operation, Where where) {
        inputs_.clear();
        for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
            for (std::uint32_t node = 0; node < operation.nodes(rank); ++node) {
                inputs_.push_back(where(rank, node));
            }
        }
    }

    // Lists where the outcome is to be on each rank.
    template <class Where>
    void take_outputs(Where where) {
        outputs_.clear();
        for (std::uint32_t rank = 0; rank < team_.size(); ++rank) outputs_.push_back(where(rank));
    }

    // Reduces the next `count` values of all inputs to all outputs, and passes them.
    void combine(const Operation& operation, std::size_t count) {
        const auto type = static_cast<std::uint32_t>(operation.type);
        const Reduce flat = kernels().of[type][static_cast<std::uint32_t>(operation.op)];
        const ReduceTree along = kernels().along_tree[type];
        const Tree* tree = operation.tree.get();
        const std::size_t value = operation.value_bytes();
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

    // -- copies -----------------------------------------------------------------------------------

    // What the root has for all, or each rank: only where their memory is decides. What is not in the
    // segment goes through staging memory, of which one half is filled while the other is read.
    void spread(const Operation& operation) {
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
        const auto half = [&](std::uint32_t each, std::size_t first) {
            return segment_.staging(each) + first / kWindowBytes % 2 * kWindowBytes;
        };
        const auto stage_from = [&](std::size_t first) {
            if (where >= 0 || first >= bytes) return;
            copy(half(rank, first), operation.data + first, std::min(kWindowBytes, bytes - first));
        };
        stage_from(0);
        publish(operation, where);
        const std::size_t window = in_segment() == team_.size() ? bytes : kWindowBytes;
        for (std::size_t first = 0; first < bytes; first += window) {
            stage_from(first + window);
            take(first, std::min(window, bytes - first), [&](std::uint32_t each) {
                const std::int64_t at = post(each).where;
                return at < 0 ? half(each, first) : segment_.base() + at + first;
            });
            step();
        }
    }

    // The records may be of any lengths, but short.
    void share(const Operation& operation) {
        copy_bytes(small(team_.rank()), operation.data, operation.count);
        publish(operation, -1);
        for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
            const std::size_t length = std::min<std::size_t>(post(rank).count, kSmallBytes);
            operation.records[rank].assign(reinterpret_cast<const char*>(small(rank)), length);
        }
    }

    // Each rank's staging memory has a part for each other rank; rounds until all have all.
    void all_to_all(const Operation& operation) {
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
            const std::uint64_t sent = segment_.letters(parity_, source)[rank];
            team_.require_length(source, sent, operation.outputs[source].bytes);
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

    Team& team_;
    Segment& segment_;
    std::vector<std::byte*> inputs_, outputs_;  // of what is being reduced
    std::vector<std::byte> room_;               // for what is being added along a tree
    unsigned parity_ = 0;
    Patience patience_ = Patience::eager;
};

}  // namespace nbelastic
