// The shape of a sum along a tree: which of its nodes each rank has, and what is added to what.
//
// The nodes of all ranks are in the order of ranks. A node's value is put on a stack; then the two on
// top are added as often as the order says. What remains in the end are the results: one, if the
// nodes are the whole tree.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "reduce.hpp"

namespace nbelastic {

class Tree {
public:
    // `leaves` and `nodes` of each rank; for each node of all ranks, in `order`, how many additions
    // follow it. Throws std::invalid_argument if they do not fit together.
    Tree(const std::vector<std::uint32_t>& leaves, const std::vector<std::uint32_t>& nodes,
         std::vector<std::uint8_t> order)
        : first_{0}, order_(std::move(order)) {
        require(nodes.size() == leaves.size(), "not as many nodes as leaves");
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
        const auto digest = [this](const auto& numbers) {  // as FNV-1a, of whole numbers
            for (const std::uint64_t each : numbers) digest_ = (digest_ ^ each) * 0x100000001b3;
        };
        digest(leaves);
        digest(first_);
        digest(order_);
    }

    std::size_t ranks() const noexcept { return first_.size() - 1; }
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

    std::vector<std::uint32_t> first_;  // of each rank's nodes; in the end, the number of all
    std::vector<std::uint8_t> order_;
    std::uint32_t most_ = 0;
    std::uint32_t deepest_ = 0;
    std::uint32_t results_ = 0;
    std::uint64_t digest_ = 0xcbf29ce484222325;
};

}  // namespace nbelastic
