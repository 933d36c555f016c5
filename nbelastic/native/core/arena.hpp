// A rank's own memory in the segment, given out in blocks.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "segment.hpp"

namespace nbelastic {

// Blocks have the size of powers of two, and are used again; only pages that are touched exist.
class Arena {
public:
    Arena(std::shared_ptr<Segment> segment, std::uint32_t rank);

    // Throws std::bad_alloc if there is no room.
    std::byte* take(std::size_t bytes);
    void give_back(std::byte* block, std::size_t bytes) noexcept;

private:
    std::shared_ptr<Segment> segment_;
    std::byte* begin_;
    std::size_t used_ = 0;
    std::map<std::size_t, std::vector<std::byte*>> free_;
    std::mutex mutex_;
};

}  // namespace nbelastic
