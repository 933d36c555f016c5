#include "arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

namespace nbelastic {
namespace {

constexpr std::size_t kLeast = 4096;

std::size_t rounded(std::size_t bytes) { return std::bit_ceil(std::max(bytes, kLeast)); }

}  // namespace

Arena::Arena(std::shared_ptr<Segment> segment, std::uint32_t rank)
    : segment_(std::move(segment)), begin_(segment_->arena(rank)) {}

std::byte* Arena::take(std::size_t bytes) {
    if (bytes > segment_->arena_bytes()) throw std::bad_alloc();
    const std::size_t size = rounded(bytes);
    const std::lock_guard lock(mutex_);
    auto& free = free_[size];
    if (!free.empty()) {
        std::byte* block = free.back();
        free.pop_back();
        return block;
    }
    if (size > segment_->arena_bytes() - used_) throw std::bad_alloc();
    free.reserve(free.capacity() + 1);  // so that giving back needs no memory
    std::byte* block = begin_ + used_;
    used_ += size;
    return block;
}

void Arena::give_back(std::byte* block, std::size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    free_[rounded(bytes)].push_back(block);
}

}  // namespace nbelastic
