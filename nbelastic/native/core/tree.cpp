#include "tree.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace nbelastic {
namespace {

// FNV-1a over whole numbers.
class Digest {
public:
    template <class Numbers>
    void add(const Numbers& numbers) {
        for (const auto each : numbers) add_one(each);
        add_one(~std::uint64_t{0});  // where one list ends
    }
    std::uint64_t value() const { return value_; }

private:
    void add_one(std::uint64_t number) {
        for (int byte = 0; byte < 8; ++byte) {
            value_ = (value_ ^ ((number >> 8 * byte) & 0xff)) * 0x100000001b3;
        }
    }
    std::uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace

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
    Digest digest;
    digest.add(leaves_);
    digest.add(first_);
    digest.add(order_);
    digest_ = digest.value();
}

}  // namespace nbelastic
