// The shape of a sum along a tree: which of its nodes each rank has, and what is added to what.
//
// The nodes of all ranks are in the order of ranks. A node's value is put on a stack; then the two on
// top are added as often as the order says. What remains in the end are the results: one, if the
// nodes are the whole tree.
#pragma once

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "reduce.hpp"

namespace nbelastic {

class Tree {
public:
    // `leaves` and `nodes` of each rank; for each node of all ranks, in `order`, how many additions
    // follow it. Throws std::invalid_argument if they do not fit together.
    Tree(std::vector<std::uint32_t> leaves, const std::vector<std::uint32_t>& nodes,
         std::vector<std::uint8_t> order);

    std::size_t ranks() const noexcept { return leaves_.size(); }
    const std::vector<std::uint32_t>& leaves() const noexcept { return leaves_; }
    const std::vector<std::uint8_t>& order() const noexcept { return order_; }
    std::uint32_t nodes(std::uint32_t rank) const noexcept { return first_[rank + 1] - first_[rank]; }
    std::uint32_t first(std::uint32_t rank) const noexcept { return first_[rank]; }
    std::uint32_t most() const noexcept { return most_; }        // nodes of one rank
    std::uint32_t deepest() const noexcept { return deepest_; }  // values on the stack at once
    std::uint32_t results() const noexcept { return results_; }

    // Equal trees have equal digests.
    std::uint64_t digest() const noexcept { return digest_; }

private:
    std::vector<std::uint32_t> leaves_;
    std::vector<std::uint32_t> first_;  // of each rank's nodes; in the end, the number of all
    std::vector<std::uint8_t> order_;
    std::uint32_t most_ = 0;
    std::uint32_t deepest_ = 0;
    std::uint32_t results_ = 0;
    std::uint64_t digest_ = 0;
};

// How a thread treats subnormal numbers, which its user may have changed. A thread that adds for
// another one must do it as that one would.
class FloatMode {
public:
    static FloatMode of_this_thread() noexcept {
        FloatMode mode;
        std::fegetenv(&mode.environment_);
        return mode;
    }
    void set() const noexcept { std::fesetenv(&environment_); }

private:
    std::fenv_t environment_{};
};

// This thread has the mode of another, as long as it lives.
class InFloatMode {
public:
    explicit InFloatMode(const FloatMode& mode) noexcept { mode.set(); }
    ~InFloatMode() { own_.set(); }
    InFloatMode(const InFloatMode&) = delete;
    InFloatMode& operator=(const InFloatMode&) = delete;

private:
    FloatMode own_ = FloatMode::of_this_thread();
};

}  // namespace nbelastic
