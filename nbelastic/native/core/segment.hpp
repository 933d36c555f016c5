// Memory that the ranks of one generation on one host share, and what lies where in it.
//
//   control | seats | letters' sizes | mailboxes | per rank: two small slots, staging | arenas
//
// The file is sparse and has no name: only pages that were touched exist, and all of it is gone
// with the last process that has it. No process can make it smaller or larger.
//
// In a fork of a process that has one, the memory becomes the fork's own when it is written to: what
// the fork does, whatever it is, does not show in its parent or on other ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "futex.hpp"

namespace nbelastic {

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kSmallBytes = 16 << 10;
// How much is reduced at a time in staging memory: what stays in a processor's own cache with
// its source and its target.
inline constexpr std::size_t kWindowBytes = 512 << 10;
// Staging memory has two windows for each node of a rank: whole ones for four nodes, smaller ones for
// more. They are one page further apart than they are long, as arenas are.
inline constexpr std::size_t kStagedNodes = 4;
inline constexpr std::size_t kStagedApart = 4 << 10;
inline constexpr std::size_t kStagingBytes = 2 * kStagedNodes * (kWindowBytes + kStagedApart);
inline constexpr std::size_t kRingBytes = 2 << 20;
inline constexpr std::size_t kReasonBytes = 512;
inline constexpr std::uint32_t kMostRanks = 256;

// The word on which collectives wait: | broken 1 bit | stir 7 bits | phase 24 bits |
inline constexpr std::uint32_t kBroken = 1u << 31;
inline constexpr std::uint32_t kStir = 1u << 24;
inline constexpr std::uint32_t kPhase = kStir - 1;

struct Control {
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t size;
    std::uint64_t arena_bytes;
    alignas(kLine) Word word;      // see above
    Word sleepers;                 // how many may be asleep on it
    alignas(kLine) Word arrived;   // arrivals at all steps so far, of all ranks
    alignas(kLine) Word reasoned;  // 0: no reason, 1: being written, 2: written, 3: ranks disagree
    char reason[kReasonBytes];
};

// What a rank says of the collective that it is in.
struct Post {
    std::uint32_t kind;
    std::uint32_t type;
    std::uint32_t op;
    std::uint32_t root;
    std::uint64_t count;
    std::int64_t where;  // of its buffer, from the start of the segment; -1: not in it
    std::uint64_t rounds;
    std::uint64_t tree;  // digest of the tree that it is along
};

struct alignas(kLine) Seat {
    Post posts[2];  // of this collective and the one before, in turns
    Word steps;     // how many steps it has arrived at
    Word left;      // whether it has left in good order
    Word alive;     // held by a thread of it; see lifeline.hpp
};

// Messages from one rank to another, through a ring. Counts are of bytes; bit 31: broken.
struct alignas(kLine) Mailbox {
    Word written;
    alignas(kLine) Word read;
    alignas(kLine) std::byte ring[kRingBytes];
};

class Segment {
public:
    // Makes a segment for `size` ranks and returns its descriptor; throws std::system_error.
    static int create(std::uint32_t size);

    // Maps the segment behind a descriptor, which stays open. Throws std::system_error, or
    // std::invalid_argument if it is none.
    explicit Segment(int fd);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    std::uint32_t size() const noexcept { return size_; }
    std::byte* base() const noexcept { return base_; }
    Control& control() const noexcept { return *reinterpret_cast<Control*>(base_); }
    Seat& seat(std::uint32_t rank) const noexcept;
    std::uint64_t* letters(unsigned parity, std::uint32_t source) const noexcept;
    Mailbox& mailbox(std::uint32_t source, std::uint32_t to) const noexcept;
    std::byte* small(std::uint32_t rank, unsigned parity) const noexcept;
    std::byte* staging(std::uint32_t rank) const noexcept;
    std::byte* arena(std::uint32_t rank) const noexcept;
    std::size_t arena_bytes() const noexcept { return arena_bytes_; }

    // Where a buffer of `rank` lies, from the start of the segment; -1 if not in its arena.
    std::int64_t place(std::uint32_t rank, const void* data, std::size_t bytes) const noexcept;

private:
    friend struct Forks;

    std::byte* base_ = nullptr;
    int fd_ = -1;  // a descriptor of its own, for forks
    std::size_t total_ = 0;
    std::size_t arena_bytes_ = 0;
    std::uint32_t size_ = 0;
};

}  // namespace nbelastic
