// Collectives in the order in which they were begun, performed by one thread at a time.
//
// An operation that is begun is queued. A thread that waits for one takes the operations up to it
// from the queue and performs them, unless the executor's own thread is doing so; that one starts
// with the first operation that is not waited for at once. An operation that fails breaks the
// segment, so nothing after it can succeed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "collectives.hpp"

namespace nbelastic {

class Executor {
public:
    explicit Executor(Team& team) : team_(team), collectives_(team) {}
    ~Executor() { close(); }
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Does an operation, and all that was begun before it. Throws Broken.
    void run(Operation operation);

    // Begins one; returns its ticket.
    std::uint64_t begin(Operation operation);
    void wait(std::uint64_t ticket);
    bool done(std::uint64_t ticket) const noexcept;

    // Whether all that was begun has ended well.
    bool idle();

    bool waiting() const noexcept { return waiting_.load(std::memory_order_relaxed); }

    // Ends the thread. The segment is broken, or nothing is under way.
    void close();

private:
    std::uint64_t enqueue(Operation operation);
    void await(std::uint64_t ticket, std::unique_lock<std::mutex>& lock);
    void perform_next(std::unique_lock<std::mutex>& lock, Patience patience);
    void work();

    Team& team_;
    Collectives collectives_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Operation> queue_;
    std::thread thread_;
    bool performing_ = false;
    int waiters_ = 0;  // threads asleep in await()
    bool closed_ = false;
    std::uint64_t begun_ = 0;
    std::atomic<std::uint64_t> ended_{0};
    std::atomic<bool> waiting_{false};
};

}  // namespace nbelastic
