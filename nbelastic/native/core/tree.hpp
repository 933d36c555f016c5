// The shape of a sum along a tree: which of its nodes each rank has, and what is added to what.
//
// The nodes of all ranks are in the order of ranks. A node's value is put on a stack; then the two on
// top are added as often as the order says. What remains in the end are the results: one, if the
// nodes are the whole tree.
#pragma once

#include <algorithm>
#include <cfenv>
#include <stdexcept>
#include <utility>
#include <vector>

#include "reduce.hpp"

namespace nbelastic {

class Tree {
public:
    // `leaves` and `nodes` of each rank; for each node of all ranks, in `order`, how many additions
    // follow it. Throws std::invalid_argument if they do not fit together.
    Tree(std::vector<std::uint32_t> leaves, const std::vector<std::uint32_t>& nodes,
         std::vector<std::uint8_t> order)
        : leaves_(std::move(leaves)), first_{0}, order_(std::move(order)) {
        require(nodes.size() == leaves_.size(), "not as many nodes as leaves");
        for (const std::uint32_t each : nodes) {
            first_.push_back(first_.back() + each);
            most_ = std::max(most_, each);
        }
        require(!order_.empty() && order_.size() == first_.back(),
                "the order is not one of these nodes");
        for (const std::uint8_t additions : order_) {
            deepest_ = std::max(deepest_, ++results_);
            require(additions < results_, "nothing is left to add to");
            results_ -= additions;
        }
        require(deepest_ <= kDeepest && most_ <= 2 * kDeepest, "the tree is too deep");
        std::vector<std::uint64_t> all(leaves_.begin(), leaves_.end());
        all.insert(all.end(), first_.begin(), first_.end());
        all.insert(all.end(), order_.begin(), order_.end());
        for (const std::uint64_t number : all) {  // FNV-1a
            for (int byte = 0; byte < 8; ++byte) {
                digest_ = (digest_ ^ ((number >> 8 * byte) & 0xff)) * 0x100000001b3;
            }
        }
    }

    std::size_t ranks() const noexcept { return leaves_.size(); }
    const std::vector<std::uint32_t>& leaves() const noexcept { return leaves_; }
    const std::vector<std::uint8_t>& order() const noexcept { return order_; }
    std::uint32_t nodes(std::uint32_t rank) const noexcept { return first_[rank + 1] - first_[rank]; }
    std::uint32_t first(std::uint32_t rank) const noexcept { return first_[rank]; }
    std::uint32_t most() const noexcept { return most_; }        // nodes of one rank
    std::uint32_t deepest() const noexcept { return deepest_; }  // values on the stack at once
    std::uint32_t results() const noexcept { return results_; }
    std::uint64_t digest() const noexcept { return digest_; }  // equal for equal trees

private:
    static void require(bool holds, const char* otherwise) {
        if (!holds) throw std::invalid_argument(otherwise);
    }

    std::vector<std::uint32_t> leaves_;
    std::vector<std::uint32_t> first_;  // of each rank's nodes; in the end, the number of all
    std::vector<std::uint8_t> order_;
    std::uint32_t most_ = 0;
    std::uint32_t deepest_ = 0;
    std::uint32_t results_ = 0;
    std::uint64_t digest_ = 0xcbf29ce484222325;
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
