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

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "segment.hpp"

namespace nbelastic {

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
    Team(std::shared_ptr<Segment> segment, std::uint32_t rank, double timeout_s);

    Segment& segment() const noexcept { return *segment_; }
    std::uint32_t rank() const noexcept { return rank_; }
    std::uint32_t size() const noexcept { return size_; }

    // Arrives, and waits for all others. Throws Broken. One thread at a time.
    void step(Patience patience);

    // Throws Broken if the segment is.
    void check() const;
    bool broken() const noexcept;
    std::string reason() const;

    // Breaks the segment for everybody; the first reason stays. Any thread, any time.
    void abort(const std::string& reason, bool differ = false) noexcept {
        break_with(reason, differ ? kDisagreement : kReasoned);
    }

    // The same, because ranks are in different operations; throws.
    [[noreturn]] void disagree(const std::string& reason);

    // Leaves in good order: nothing that others need from this rank is missing.
    void leave() noexcept;
    bool has_left(std::uint32_t rank) const noexcept;

    std::chrono::nanoseconds limit() const noexcept { return limit_; }

private:
    static constexpr std::uint32_t kReasoned = 2, kDisagreement = 3;  // of Control::reasoned

    void break_with(const std::string& reason, std::uint32_t how) noexcept;
    [[noreturn]] void fail() const;
    void advance(std::uint32_t target) noexcept;
    bool wait_awake(std::uint32_t target, Patience patience) const;
    void wait_asleep(std::uint32_t target);
    void blame_absent(std::uint32_t step);

    std::shared_ptr<Segment> segment_;
    Control& control_;
    std::uint32_t rank_;
    std::uint32_t size_;
    std::uint32_t steps_ = 0;
    std::chrono::nanoseconds limit_;
    int spins_;
    int yields_;
};

}  // namespace nbelastic
