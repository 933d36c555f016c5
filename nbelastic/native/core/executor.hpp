// Collectives in the order in which they were begun, performed by one thread at a time.
//
// An operation that is begun is queued. A thread that waits for one takes the operations up to it
// from the queue and performs them, unless the executor's own thread is doing so; that one starts
// with the first operation that is not waited for at once. An operation that fails breaks the
// segment, so nothing after it can succeed.
#pragma once

#include <condition_variable>
#include <deque>
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
    void run(Operation operation) {
        team_.check();
        std::unique_lock lock(mutex_);
        await(enqueue(std::move(operation)), lock);
    }

    // Begins one; returns its ticket.
    std::uint64_t begin(Operation operation) {
        team_.check();
        std::unique_lock lock(mutex_);
        const std::uint64_t ticket = enqueue(std::move(operation));
        if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
        lock.unlock();
        changed_.notify_all();
        return ticket;
    }

    void wait(std::uint64_t ticket) {
        team_.check();
        std::unique_lock lock(mutex_);
        await(ticket, lock);
    }

    bool done(std::uint64_t ticket) const noexcept {
        return ended_.load(std::memory_order_acquire) >= ticket || team_.broken();
    }

    // Whether all that was begun has ended well.
    bool idle() {
        const std::lock_guard lock(mutex_);
        return ended_.load() == begun_;
    }

    bool waiting() const noexcept { return waiting_.load(std::memory_order_relaxed); }

    // Ends the thread. The segment is broken, or nothing is under way.
    void close() {
        {
            const std::lock_guard lock(mutex_);
            closed_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

private:
    std::uint64_t enqueue(Operation operation) {
        if (closed_) throw Broken("this rank has left");
        queue_.push_back(std::move(operation));
        return ++begun_;
    }

    void await(std::uint64_t ticket, std::unique_lock<std::mutex>& lock) {
        waiting_.store(true);
        while (ended_.load() < ticket) {
            if (performing_) {
                ++waiters_;
                changed_.wait(lock);
                --waiters_;
            } else {
                perform_next(lock, Patience::eager);
            }
        }
        waiting_.store(false);
        lock.unlock();
        team_.check();
    }

    void perform_next(std::unique_lock<std::mutex>& lock, Patience patience) {
        const Operation operation = std::move(queue_.front());
        queue_.pop_front();
        performing_ = true;
        lock.unlock();
        try {
            collectives_.perform(operation, patience);
        } catch (const Broken&) {
            // the thread that waits for it finds the segment broken
        } catch (const std::exception& error) {  // no memory
            team_.abort(error.what());
        }
        lock.lock();
        performing_ = false;
        ended_.fetch_add(1);
        // No thread is woken without need: that takes longer than a small operation.
        if (waiters_ > 0 || !queue_.empty()) changed_.notify_all();
    }

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return closed_ || (!queue_.empty() && !performing_); });
            if (closed_) return;
            perform_next(lock, Patience::background);
        }
    }

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
