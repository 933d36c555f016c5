#include "team.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace nbelastic {
namespace {

using std::chrono::steady_clock;

// No thread misses a word that was changed; this is for what changes without one.
constexpr auto kNap = std::chrono::milliseconds(100);

constexpr int kSpins = 100;   // a microsecond or two; more, if the other waits for this processor, is lost
constexpr int kYields = 100;  // costs little where no other process wants it
constexpr int kBackground = 20;

// A process that has had the processor for so long is no rank that is about to arrive. To go on
// yielding would count against this one: Linux (since 6.6) puts off threads that yield repeatedly.
constexpr auto kTaken = std::chrono::microseconds(200);

int processors() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    return std::max(1, CPU_COUNT(&set));
}

}  // namespace

Team::Team(std::shared_ptr<Segment> segment, std::uint32_t rank, double timeout_s)
    : segment_(std::move(segment)),
      control_(segment_->control()),
      rank_(rank),
      size_(segment_->size()),
      limit_(std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::duration<double>(std::clamp(timeout_s, 0.001, 1e9)))) {
    if (rank >= size_) throw std::invalid_argument("no such rank in this segment");
    const bool room = static_cast<int>(size_) <= processors();
    spins_ = room ? kSpins : kBackground;
    yields_ = kYields;
}

bool Team::broken() const noexcept {
    return (control_.word.load(std::memory_order_acquire) & kBroken) != 0;
}

void Team::check() const {
    if (broken()) fail();
}

void Team::fail() const {
    if (control_.reasoned.load(std::memory_order_acquire) == kDisagreement) {
        throw Disagreement(reason());
    }
    throw Broken(reason());
}

void Team::disagree(const std::string& reason) {
    break_with("ranks disagree: " + reason, kDisagreement);
    fail();
}

std::string Team::reason() const {
    if (control_.reasoned.load(std::memory_order_acquire) < kReasoned) return "the segment was broken";
    return std::string(control_.reason, strnlen(control_.reason, kReasonBytes));
}

void Team::break_with(const std::string& reason, std::uint32_t how) noexcept {
    std::uint32_t none = 0;
    if (control_.reasoned.compare_exchange_strong(none, 1)) {
        const std::size_t length = std::min(reason.size(), kReasonBytes - 1);
        std::memcpy(control_.reason, reason.data(), length);
        control_.reason[length] = '\0';
        control_.reasoned.store(how, std::memory_order_release);
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

void Team::leave() noexcept {
    segment_->seat(rank_).left.store(1);
    std::uint32_t word = control_.word.load();
    while (!control_.word.compare_exchange_weak(
        word, (word & (kBroken | kPhase)) | ((word + kStir) & ~(kBroken | kPhase)))) {
    }
    wake_all(control_.word);
}

bool Team::has_left(std::uint32_t rank) const noexcept {
    return segment_->seat(rank).left.load() != 0;
}

void Team::step(Patience patience) {
    check();
    const std::uint32_t step = ++steps_;
    segment_->seat(rank_).steps.store(step, std::memory_order_relaxed);
    if (control_.arrived.fetch_add(1) + 1 == step * size_) {
        advance(step & kPhase);
        return;
    }
    if (!wait_awake(step & kPhase, patience)) wait_asleep(step & kPhase);
}

void Team::advance(std::uint32_t target) noexcept {
    std::uint32_t word = control_.word.load();
    while (!control_.word.compare_exchange_weak(word, (word & ~kPhase) | target)) {
    }
    if (control_.sleepers.load() != 0) wake_all(control_.word);
}

bool Team::wait_awake(std::uint32_t target, Patience patience) const {
    const bool eager = patience == Patience::eager;
    const int spins = eager ? spins_ : kBackground;
    int turns = spins + (eager ? yields_ : 1);
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

void Team::wait_asleep(std::uint32_t target) {
    const auto deadline = steady_clock::now() + limit_;
    control_.sleepers.fetch_add(1);
    for (;;) {
        const std::uint32_t word = control_.word.load();
        if ((word & kBroken) || (word & kPhase) == target) break;
        blame_absent(steps_);
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

void Team::blame_absent(std::uint32_t step) {
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
        const Seat& seat = segment_->seat(rank);
        if (seat.left.load() && static_cast<std::int32_t>(step - seat.steps.load()) > 0) {
            abort("rank " + std::to_string(rank) + " of this host has left");
        }
    }
}

}  // namespace nbelastic
