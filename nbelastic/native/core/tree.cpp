#include "tree.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace nbelastic {

Tree::Tree(std::vector<std::uint32_t> leaves, const std::vector<std::uint32_t>& nodes,
           std::vector<std::uint8_t> order)
    : leaves_(std::move(leaves)), first_{0}, order_(std::move(order)) {
    if (nodes.size() != leaves_.size()) throw std::invalid_argument("not as many nodes as leaves");
    for (const std::uint32_t each : nodes) {
        first_.push_back(first_.back() + each);
        most_ = std::max(most_, each);
    }
    if (order_.empty() || order_.size() != first_.back()) {
        throw std::invalid_argument("the order is not one of these nodes");
    }
    for (const std::uint8_t additions : order_) {
        deepest_ = std::max(deepest_, ++results_);
        if (additions >= results_) throw std::invalid_argument("nothing is left to add to");
        results_ -= additions;
    }
    if (deepest_ > kDeepest || most_ > 2 * kDeepest) throw std::invalid_argument("the tree is too deep");
    std::vector<std::uint64_t> all(leaves_.begin(), leaves_.end());
    all.insert(all.end(), first_.begin(), first_.end());
    all.insert(all.end(), order_.begin(), order_.end());
    digest_ = 0xcbf29ce484222325;
    for (const std::uint64_t number : all) {  // FNV-1a
        for (int byte = 0; byte < 8; ++byte) {
            digest_ = (digest_ ^ ((number >> 8 * byte) & 0xff)) * 0x100000001b3;
        }
    }
}

}  // namespace nbelastic
