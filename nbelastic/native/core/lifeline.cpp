#include "lifeline.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

namespace nbelastic {
namespace {

// The kernel wakes the thread for a death. This is for a stop between its look and its sleep.
constexpr auto kNap = std::chrono::milliseconds(100);

}  // namespace

void Lifeline::start() {
    std::promise<void> held;
    std::future<void> outcome = held.get_future();
    thread_ = std::thread([this, held = std::move(held)]() mutable { hold(std::move(held)); });
    outcome.get();
}

void Lifeline::stop() {
    if (!thread_.joinable()) return;
    stopped_.store(true);
    wake_all(word_of_next());
    thread_.join();
}

std::vector<std::uint32_t> Lifeline::dead() const {
    std::vector<std::uint32_t> found;
    for (std::uint32_t rank = 0; rank < team_.size(); ++rank) {
        if (is_dead(rank)) found.push_back(rank);
    }
    return found;
}

bool Lifeline::is_dead(std::uint32_t rank) const noexcept {
    return (segment_.seat(rank).alive.load() & FUTEX_OWNER_DIED) != 0 && !team_.has_left(rank);
}

Word& Lifeline::word_of_next() const noexcept {
    return segment_.seat((team_.rank() + 1) % team_.size()).alive;
}

// The kernel walks this thread's list, of one entry, when the thread ends: by then it is gone, unless
// the process has been killed. The list is in this process; only the word is in the segment.
void Lifeline::hold(std::promise<void> held) {
    Word& own = segment_.seat(team_.rank()).alive;
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

void Lifeline::watch() {
    const std::uint32_t next = (team_.rank() + 1) % team_.size();
    while (!stopped_.load()) {
        const std::uint32_t seen = word_of_next().load();
        if (is_dead(next) && !team_.broken()) {
            team_.abort("the process of rank " + std::to_string(next) + " of this host is gone");
        }
        sleep_on(word_of_next(), seen, kNap);
    }
}

}  // namespace nbelastic
