// Barriers of all ranks of a segment, and its end.
//
// A step is a barrier. Each rank adds one to `arrived`; the last one moves `phase` on, and wakes
// the threads that sleep on the word with it. The same word says that the segment is broken, so a
// thread that waits for one sees the other. Waiting is in three parts: some turns of a loop, some
// yields to other processes, then sleep.
//
// A rank that leaves in good order says so and changes the word: a thread that waits for that rank
// at a later step wakes, and breaks the segment.
#pragma once

#include <sched.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "segment.hpp"

namespace nbelastic {

using std::chrono::steady_clock;

class Broken : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Broken because ranks were in different operations.
class Disagreement : public Broken {
    using Broken::Broken;
};

// How much there is to gain by waiting awake.
enum class Patience {
    background,  // the rank has other things to do
    eager,       // it has not
};

class Team {
public:
    Team(std::shared_ptr<Segment> segment, std::uint32_t rank, std::uint32_t size, double timeout_s)
        : segment_(std::move(segment)),
          control_(segment_->control()),
          rank_(rank),
          size_(size),
          limit_(std::chrono::duration_cast<std::chrono::nanoseconds>(
              std::chrono::duration<double>(std::clamp(timeout_s, 0.001, 1e9)))) {
        if (rank >= size_ || size_ > segment_->size()) throw std::invalid_argument("no such rank in this segment");
        cpu_set_t set;
        const int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
        spins_ = static_cast<int>(size_) <= processors ? kSpins : kBackground;
    }

    Segment& segment() const noexcept { return *segment_; }
    std::uint32_t rank() const noexcept { return rank_; }
    std::uint32_t size() const noexcept { return size_; }
    std::chrono::nanoseconds limit() const noexcept { return limit_; }

    // Arrives, and waits for all others. Throws Broken. One thread at a time.
    void step(Patience patience) {
        check();
        const std::uint32_t step = ++steps_;
        segment_->seat(rank_).steps.store(step, std::memory_order_relaxed);
        if (control_.arrived.fetch_add(1) + 1 == step * size_) {
            change_word([step](std::uint32_t word) { return (word & ~kPhase) | (step & kPhase); });
            if (control_.sleepers.load() != 0) wake_all(control_.word);
            return;
        }
        if (!wait_awake(step & kPhase, patience)) wait_asleep(step & kPhase);
    }

    bool broken() const noexcept {
        return (control_.word.load(std::memory_order_acquire) & kBroken) != 0;
    }

    // Throws Broken if the segment is.
    void check() const {
        if (broken()) fail();
    }

    std::string reason() const {
        if (control_.reasoned.load(std::memory_order_acquire) < kReasoned) {
            return "the segment was broken";
        }
        return std::string(control_.reason, strnlen(control_.reason, kReasonBytes));
    }

    // Breaks the segment for everybody; the first reason stays. Any thread, any time.
    void abort(const std::string& reason, bool differ = false) noexcept {
        std::uint32_t none = 0;
        if (control_.reasoned.compare_exchange_strong(none, 1)) {
            const std::size_t length = std::min(reason.size(), kReasonBytes - 1);
            std::memcpy(control_.reason, reason.data(), length);
            control_.reason[length] = '\0';
            control_.reasoned.store(differ ? kDisagreement : kReasoned, std::memory_order_release);
        }
        if (control_.word.fetch_or(kBroken) & kBroken) return;
        wake_all(control_.word);
        for (std::uint32_t source = 0; source < size_; ++source) {
            for (std::uint32_t to = 0; to < size_; ++to) {
                if (source == to) continue;
                Mailbox& box = segment_->mailbox(source, to);
                for (Word* word : {&box.written, &box.read}) {
                    word->fetch_or(kBroken);
                    wake_all(*word);
                }
            }
        }
    }

    // The same, because ranks are in different operations; throws.
    [[noreturn]] void disagree(const std::string& reason) {
        abort("ranks disagree: " + reason, true);
        fail();
    }

    // The same, unless `source` sends as much as this rank expects.
    void require_length(std::uint32_t source, std::uint64_t sent, std::size_t expected) {
        if (sent == expected) return;
        disagree("rank " + std::to_string(source) + " sends " + std::to_string(sent) +
                 " bytes, rank " + std::to_string(rank_) + " expects " + std::to_string(expected));
    }

    // Leaves in good order: nothing that others need from this rank is missing.
    void leave() noexcept {
        segment_->seat(rank_).left.store(1);
        constexpr std::uint32_t rest = kBroken | kPhase;
        change_word([](std::uint32_t word) { return (word & rest) | ((word + kStir) & ~rest); });
        wake_all(control_.word);
    }

    bool has_left(std::uint32_t rank) const noexcept {
        return segment_->seat(rank).left.load() != 0;
    }

private:
    static constexpr std::uint32_t kReasoned = 2, kDisagreement = 3;  // of Control::reasoned

    // No thread misses a word that was changed; this is for what changes without one.
    static constexpr auto kNap = std::chrono::milliseconds(100);

    // A microsecond or two; more, if the other waits for this processor, is lost.
    static constexpr int kSpins = 100;
    static constexpr int kYields = 100;  // costs little where no other process wants it
    static constexpr int kBackground = 20;

    // A process that has had the processor for so long is no rank that is about to arrive. To go on
    // yielding would count against this one: Linux (since 6.6) puts off threads that yield repeatedly.
    static constexpr auto kTaken = std::chrono::microseconds(200);

    template <class Change>
    void change_word(Change change) noexcept {
        std::uint32_t word = control_.word.load();
        while (!control_.word.compare_exchange_weak(word, change(word))) {
        }
    }

    [[noreturn]] void fail() const {
        if (control_.reasoned.load(std::memory_order_acquire) == kDisagreement) {
            throw Disagreement(reason());
        }
        throw Broken(reason());
    }

    bool wait_awake(std::uint32_t target, Patience patience) const {
        const bool eager = patience == Patience::eager;
        const int spins = eager ? spins_ : kBackground;
        int turns = spins + (eager ? kYields : 1);
        for (int turn = 0; turn < turns; ++turn) {
            const std::uint32_t word = control_.word.load(std::memory_order_acquire);
            if (word & kBroken) fail();
            if ((word & kPhase) == target) return true;
            if (turn < spins) {
                relax();
                continue;
            }
            const auto begin = steady_clock::now();
            sched_yield();
            if (steady_clock::now() - begin > kTaken) turns = std::min(turns, turn + 2);
        }
        return false;
    }

    void wait_asleep(std::uint32_t target) {
        const auto deadline = steady_clock::now() + limit_;
        control_.sleepers.fetch_add(1);
        for (;;) {
            const std::uint32_t word = control_.word.load();
            if ((word & kBroken) || (word & kPhase) == target) break;
            blame_absent();
            if (steady_clock::now() >= deadline) {
                char text[96];
                std::snprintf(text, sizeof text, "not all ranks came within %g s",
                              std::chrono::duration<double>(limit_).count());
                abort(text);
                break;
            }
            sleep_on(control_.word, word, kNap);
        }
        control_.sleepers.fetch_sub(1);
        check();
    }

    // Breaks the segment if a rank has left that this step needs.
    void blame_absent() {
        for (std::uint32_t rank = 0; rank < size_; ++rank) {
            const Seat& seat = segment_->seat(rank);  // `left` is read first: it leaves after a step
            if (seat.left.load() && static_cast<std::int32_t>(steps_ - seat.steps.load()) > 0) {
                abort("rank " + std::to_string(rank) + " of this host has left");
            }
        }
    }

    std::shared_ptr<Segment> segment_;
    Control& control_;
    std::uint32_t rank_;
    std::uint32_t size_;
    std::uint32_t steps_ = 0;
    std::chrono::nanoseconds limit_;
    int spins_;
};

}  // namespace nbelastic
