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

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace nbelastic {

// A word in shared memory, for whose change threads of all processes can wait.
using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

// Sleeps while `word` is `expected`, for at most `limit`; may return early.
inline void sleep_on(Word& word, std::uint32_t expected, std::chrono::nanoseconds limit) noexcept {
    const timespec time{static_cast<std::time_t>(limit.count() / 1'000'000'000),
                        static_cast<long>(limit.count() % 1'000'000'000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

// Wakes all who sleep on `word`, in whichever process.
inline void wake_all(Word& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Tells the processor that this is a loop that waits.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kSmallBytes = 16 << 10;
// How much is reduced at a time in staging memory: what stays in a processor's own cache with
// its source and its target.
inline constexpr std::size_t kWindowBytes = 512 << 10;
// Between two arenas, or two windows: addresses that are alike but for high bits are one and the same
// to the first cache of some processors (AMD since Zen), and a sum is of the same place in all.
inline constexpr std::size_t kApart = kPage;
// Staging memory has two windows for each node of a rank: whole ones for four nodes, smaller ones for
// more.
inline constexpr std::size_t kStagedNodes = 4;
inline constexpr std::size_t kStagingBytes = 2 * kStagedNodes * (kWindowBytes + kApart);
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

constexpr std::size_t up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Where each part begins, in a segment for so many ranks.
struct Offsets {
    std::size_t seats, letters, mailboxes, smalls, staging, arenas;

    explicit constexpr Offsets(std::size_t n)
        : seats(up(sizeof(Control), kPage)),
          letters(seats + up(n * sizeof(Seat), kPage)),
          mailboxes(letters + up(2 * n * n * sizeof(std::uint64_t), kPage)),
          smalls(mailboxes + up(n * n * sizeof(Mailbox), kPage)),
          staging(smalls + n * 2 * kSmallBytes),
          arenas(staging + n * (kStagingBytes + kApart)) {}
};

class Segment {
public:
    // Makes a segment for `size` ranks or fewer and returns its descriptor; throws std::system_error.
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
    Seat& seat(std::uint32_t rank) const noexcept {
        return reinterpret_cast<Seat*>(base_ + at_.seats)[rank];
    }
    std::uint64_t* letters(unsigned parity, std::uint32_t source) const noexcept {
        auto* all = reinterpret_cast<std::uint64_t*>(base_ + at_.letters);
        return all + (parity * std::size_t{size_} + source) * size_;
    }
    Mailbox& mailbox(std::uint32_t source, std::uint32_t to) const noexcept {
        auto* all = reinterpret_cast<Mailbox*>(base_ + at_.mailboxes);
        return all[std::size_t{source} * size_ + to];
    }
    std::byte* small(std::uint32_t rank, unsigned parity) const noexcept {
        return base_ + at_.smalls + (2 * std::size_t{rank} + parity) * kSmallBytes;
    }
    std::byte* staging(std::uint32_t rank) const noexcept {
        return base_ + at_.staging + rank * (kStagingBytes + kApart);
    }
    std::byte* arena(std::uint32_t rank) const noexcept {
        return base_ + at_.arenas + rank * (arena_bytes_ + kApart);
    }
    std::size_t arena_bytes() const noexcept { return arena_bytes_; }

    // Where a buffer of `rank` lies, from the start of the segment; -1 if not in its arena.
    std::int64_t place(std::uint32_t rank, const void* data, std::size_t bytes) const noexcept {
        const auto begin = reinterpret_cast<std::uintptr_t>(arena(rank));
        const auto at = reinterpret_cast<std::uintptr_t>(data);
        if (at < begin || bytes > arena_bytes_ || at - begin > arena_bytes_ - bytes) return -1;
        return static_cast<std::int64_t>(at - reinterpret_cast<std::uintptr_t>(base_));
    }

private:
    friend struct Forks;

    std::byte* base_ = nullptr;
    int fd_ = -1;  // a descriptor of its own, for forks
    std::size_t total_ = 0;
    std::size_t arena_bytes_ = 0;
    std::uint32_t size_ = 0;
    Offsets at_{0};
};

// A rank's own memory in the segment. Its blocks have the size of powers of two, and are used again;
// only pages that are touched exist.
class Arena {
public:
    Arena(std::shared_ptr<Segment> segment, std::uint32_t rank)
        : segment_(std::move(segment)), begin_(segment_->arena(rank)) {}

    // Throws std::bad_alloc if there is no room.
    std::byte* take(std::size_t bytes) {
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

    void give_back(std::byte* block, std::size_t bytes) noexcept {
        const std::lock_guard lock(mutex_);
        free_[rounded(bytes)].push_back(block);
    }

private:
    static std::size_t rounded(std::size_t bytes) { return std::bit_ceil(std::max(bytes, kPage)); }

    std::shared_ptr<Segment> segment_;
    std::byte* begin_;
    std::size_t used_ = 0;
    std::map<std::size_t, std::vector<std::byte*>> free_;
    std::mutex mutex_;
};

}  // namespace nbelastic
