// Messages from one rank to another, through a ring in the segment for each direction.
#pragma once

#include "collectives.hpp"

namespace nbelastic {

// One end of a ring: `own` is what this rank moves on, `other` what it waits for.
class RingEnd {
public:
    RingEnd(Team& team, Mailbox& box, bool writes, std::uint32_t peer)
        : team_(team),
          box_(box),
          own_(writes ? box.written : box.read),
          other_(writes ? box.read : box.written),
          writes_(writes),
          peer_(peer) {}

    void move(std::byte* data, std::size_t bytes) {
        while (bytes > 0) {
            const std::uint32_t at = own_.load(std::memory_order_relaxed) & kCount;
            const std::size_t free = wait(at);
            const std::size_t begin = at % kRingBytes;
            const std::size_t n = std::min({bytes, free, kRingBytes - begin, kPiece});
            if (writes_) {
                write(box_.ring + begin, data, n);
            } else {
                copy_bytes(data, box_.ring + begin, n);
            }
            advance(at, n);
            data += n;
            bytes -= n;
        }
    }

private:
    static constexpr auto kNap = std::chrono::milliseconds(50);  // after it: has the other rank left?
    static constexpr int kSpins = 500;
    // So that one end writes while the other reads.
    static constexpr std::size_t kPiece = kRingBytes / 16;
    static constexpr std::uint32_t kCount = kBroken - 1;

    // A piece that took longer to be written (4 GB/s): the ring is in the caches of a processor far
    // away, on another die, maybe, or that of another socket.
    static constexpr auto kSlow = std::chrono::nanoseconds(kPiece / 4);

    // Returns how many bytes can be moved now: at least one.
    std::size_t wait(std::uint32_t at) {
        const auto deadline = steady_clock::now() + team_.limit();
        for (int turn = 0;; ++turn) {
            const std::uint32_t word = other_.load(std::memory_order_acquire);
            if (word & kBroken) throw Broken(team_.reason());
            const std::uint32_t apart = (writes_ ? at - word : word - at) & kCount;
            const std::size_t ready = writes_ ? kRingBytes - apart : apart;
            if (ready > 0) return ready;
            if (turn < kSpins) {
                relax();
                continue;
            }
            if (team_.has_left(peer_) && other_.load() == word) fail(" of this host has left");
            if (steady_clock::now() >= deadline) fail(" of this host does not answer");
            sleep_on(other_, word, kNap);
        }
    }

    void write(std::byte* to, const std::byte* data, std::size_t n) {
        if (far_) return stream_bytes(to, data, n);
        const auto begin = steady_clock::now();
        copy_bytes(to, data, n);
        far_ = n == kPiece && steady_clock::now() - begin > kSlow;
    }

    void advance(std::uint32_t at, std::size_t n) {
        std::uint32_t word = own_.load();
        const auto moved = static_cast<std::uint32_t>((at + n) & kCount);
        while (!own_.compare_exchange_weak(word, (word & kBroken) | moved)) {
        }
        wake_all(own_);
    }

    [[noreturn]] void fail(const char* what) {
        team_.abort("rank " + std::to_string(peer_) + what);
        throw Broken(team_.reason());
    }

    Team& team_;
    Mailbox& box_;
    Word& own_;
    Word& other_;
    bool writes_;
    bool far_ = false;  // of this message: found out anew with each, since threads move
    std::uint32_t peer_;
};

// Sends pieces as one message, and returns when the last byte is in the ring. One thread at a time
// for each direction.
inline void send(Team& team, const std::vector<Piece>& pieces, std::uint32_t to) {
    team.check();
    RingEnd end(team, team.segment().mailbox(team.rank(), to), true, to);
    std::uint64_t length = 0;
    for (const auto& [data, bytes] : pieces) length += bytes;
    end.move(reinterpret_cast<std::byte*>(&length), sizeof length);
    for (const auto& [data, bytes] : pieces) end.move(data, bytes);  // only read: it is the writer
}

// Receives a message, which must be of this length.
inline void receive(Team& team, std::byte* data, std::size_t bytes, std::uint32_t source) {
    team.check();
    RingEnd end(team, team.segment().mailbox(source, team.rank()), false, source);
    std::uint64_t length = 0;
    end.move(reinterpret_cast<std::byte*>(&length), sizeof length);
    team.require_length(source, length, bytes);
    end.move(data, bytes);
}

}  // namespace nbelastic
