// Detection of a process's death before its memory is freed.
//
// The system closes a dead process's sockets, and reports its end, only when it has freed its
// memory, the later the more there was. It unlocks what the threads held locked before (robust
// futexes). So each rank has a thread that holds a word of its seat, and waits for that of the next
// rank, which breaks the segment for all. All ranks can read there which are dead.
// See https://www.kernel.org/doc/html/latest/locking/robust-futexes.html.
#pragma once

#include <cerrno>
#include <future>
#include <system_error>
#include <thread>

#include "team.hpp"

namespace nbelastic {

class Lifeline {
public:
    explicit Lifeline(Team& team) : team_(team) {}
    ~Lifeline() { stop(); }
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;

    // Returns when the thread holds the word. Throws std::system_error where the system refuses.
    void start() {
        std::promise<void> held;
        std::future<void> outcome = held.get_future();
        thread_ = std::thread([this, held = std::move(held)]() mutable { hold(std::move(held)); });
        outcome.get();
    }

    void stop() {
        if (!thread_.joinable()) return;
        stopped_.store(true);
        wake_all(word_of(next()));
        thread_.join();
    }

    // The ranks whose processes have ended without leaving.
    std::vector<std::uint32_t> dead() const {
        std::vector<std::uint32_t> found;
        for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
            if (is_dead(rank)) found.push_back(rank);
        }
        return found;
    }

private:
    // The kernel wakes the thread for a death. This is for a stop between its look and its sleep.
    static constexpr auto kNap = std::chrono::milliseconds(100);

    std::uint32_t next() const noexcept { return (team_.rank() + 1) % team_.size(); }
    Word& word_of(std::uint32_t rank) const noexcept { return team_.segment().seat(rank).alive; }
    bool is_dead(std::uint32_t rank) const noexcept {
        return (word_of(rank).load() & FUTEX_OWNER_DIED) != 0 && !team_.has_left(rank);
    }

    // The kernel walks this thread's list, of one entry, when the thread ends: by then it is gone,
    // unless the process has been killed. The list is in this process; only the word is in the segment.
    void hold(std::promise<void> held) {
        Word& own = word_of(team_.rank());
        robust_list entry{};
        robust_list_head list{};
        entry.next = &list.list;
        list.list.next = &entry;
        list.futex_offset = reinterpret_cast<char*>(&own) - reinterpret_cast<char*>(&entry);
        if (syscall(SYS_set_robust_list, &list, sizeof list) != 0) {
            const std::system_error refused(errno, std::generic_category(), "set_robust_list");
            return held.set_exception(std::make_exception_ptr(refused));
        }
        own.store(static_cast<std::uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS);
        wake_all(own);
        held.set_value();
        watch();
        own.store(0);
        syscall(SYS_set_robust_list, nullptr, sizeof list);
        wake_all(own);
    }

    void watch() {
        while (!stopped_.load()) {
            const std::uint32_t seen = word_of(next()).load();
            if (is_dead(next()) && !team_.broken()) {
                team_.abort("the process of rank " + std::to_string(next()) + " of this host is gone");
            }
            sleep_on(word_of(next()), seen, kNap);
        }
    }

    Team& team_;
    std::atomic<bool> stopped_{false};
    std::thread thread_;
};

}  // namespace nbelastic
