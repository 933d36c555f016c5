#include "executor.hpp"

#include <utility>

namespace nbelastic {

void Executor::run(Operation operation) {
    team_.check();
    std::unique_lock lock(mutex_);
    await(enqueue(std::move(operation)), lock);
}

std::uint64_t Executor::begin(Operation operation) {
    team_.check();
    std::unique_lock lock(mutex_);
    const std::uint64_t ticket = enqueue(std::move(operation));
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    lock.unlock();
    changed_.notify_all();
    return ticket;
}

void Executor::wait(std::uint64_t ticket) {
    team_.check();
    std::unique_lock lock(mutex_);
    await(ticket, lock);
}

bool Executor::done(std::uint64_t ticket) const noexcept {
    return ended_.load(std::memory_order_acquire) >= ticket || team_.broken();
}

bool Executor::idle() {
    const std::lock_guard lock(mutex_);
    return ended_.load() == begun_;
}

void Executor::close() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

std::uint64_t Executor::enqueue(Operation operation) {
    if (closed_) throw Broken("this rank has left");
    queue_.push_back(std::move(operation));
    return ++begun_;
}

void Executor::await(std::uint64_t ticket, std::unique_lock<std::mutex>& lock) {
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

void Executor::perform_next(std::unique_lock<std::mutex>& lock, Patience patience) {
    const Operation operation = std::move(queue_.front());
    queue_.pop_front();
    performing_ = true;
    lock.unlock();
    try {
        collectives_.perform(operation, patience);
    } catch (const Broken&) {
        // the thread that waits for it finds the segment broken
    }
    lock.lock();
    performing_ = false;
    ended_.fetch_add(1);
    // No thread is woken without need: that takes longer than a small operation.
    if (waiters_ > 0 || !queue_.empty()) changed_.notify_all();
}

void Executor::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return closed_ || (!queue_.empty() && !performing_); });
        if (closed_) return;
        perform_next(lock, Patience::background);
    }
}

}  // namespace nbelastic
