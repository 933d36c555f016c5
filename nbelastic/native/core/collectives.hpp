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

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "reduce.hpp"
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
    std::vector<std::size_t> counts;  // values in the part of each rank
    std::vector<Piece> outputs;
    std::vector<Piece> inputs;
    std::span<std::string> records{};  // of a share: one for each rank, to be filled
    // Of a sum along a tree: pieces of `outputs`, and as long ones of each node in `inputs`.
    std::shared_ptr<const Tree> tree{};
    FloatMode mode{};

    // How many nodes a rank has: values for each of the outcome. In an order, `first` is its first.
    std::uint32_t nodes(std::uint32_t rank) const { return tree ? tree->nodes(rank) : 1; }
    std::uint32_t first(std::uint32_t rank) const { return tree ? tree->first(rank) : rank; }
    std::uint32_t most() const { return tree ? tree->most() : 1; }

    // Where the outcome of an allreduce goes: without a tree, where the values were.
    std::span<const Piece> outcome() const { return tree ? outputs : inputs; }
};

class Collectives {
public:
    explicit Collectives(Team& team) : team_(team), segment_(team.segment()) {}

    // Does it, and throws Broken if that cannot be. One thread at a time, the same on all ranks.
    void perform(const Operation& operation, Patience patience);

private:
    class Window;
    class Parts;

    void publish(const Operation& operation, std::int64_t where, std::uint64_t rounds = 0);
    void agree(const Post& own);
    const Post& post(std::uint32_t rank) const;
    std::uint32_t in_segment() const;
    bool is_small(std::size_t bytes) const;
    std::byte* small(std::uint32_t rank) const;

    void allreduce(const Operation& operation);
    void allreduce_small(const Operation& operation, std::size_t bytes);
    void allreduce_in_place(const Operation& operation);
    void allreduce_staged(const Operation& operation, std::vector<Parts>& from, std::size_t bytes);
    std::vector<Parts> nodes_of(const Operation& operation) const;
    std::int64_t place_nodes(const Operation& operation, std::size_t bytes) const;
    std::size_t window_of(const Operation& operation) const;
    std::byte* staged(const Operation& operation, std::uint32_t rank, std::uint32_t turn,
                      std::uint32_t node) const;
    template <class Each>
    void others_of(const Operation& operation, Parts& window, std::size_t bytes, std::byte* staging,
                   Each each);
    void stage(const Operation& operation, std::vector<Parts>& from, std::size_t bytes,
               std::uint32_t turn);
    void reduce_share(const Operation& operation, std::vector<Parts>& nodes, Parts& results,
                      std::size_t bytes, std::uint32_t turn);
    void reduce_scatter(const Operation& operation);
    template <class Where>
    void take_inputs(const Operation& operation, Where where);
    template <class Where>
    void take_outputs(Where where);
    void combine(const Operation& operation, std::size_t count);
    void gather_parts(const Operation& operation);
    void spread(const Operation& operation);
    void all_to_all(const Operation& operation);
    void share(const Operation& operation);
    std::string told(std::uint32_t rank) const;
    std::string leaves_of(std::uint32_t rank) const;

    void copy(std::byte* to, const std::byte* from, std::size_t bytes);
    void step() { team_.step(patience_); }

    Team& team_;
    Segment& segment_;
    std::vector<std::byte*> inputs_, outputs_;  // of what is being reduced
    std::vector<std::byte> room_;               // for what is being added along a tree
    unsigned parity_ = 0;
    Patience patience_ = Patience::eager;
};

}  // namespace nbelastic
