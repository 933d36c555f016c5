#include "lifeline.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>

namespace nbelastic {
namespace {

constexpr auto kNap = std::chrono::seconds(1);

// What futex_waitv(2) takes, since Linux 5.16; the headers may be older.
struct Waited {
    std::uint64_t value;
    std::uint64_t word;
    std::uint32_t flags;
    std::uint32_t reserved;
};
constexpr std::uint32_t kWord32 = 2;
constexpr long kFutexWaitv = 449;  // on all processors

Waited waited(const Word& word, std::uint32_t value) {
    return {value, reinterpret_cast<std::uintptr_t>(&word), kWord32, 0};
}

}  // namespace

void Lifeline::start() {
    thread_ = std::thread([this] { hold(); });
}

void Lifeline::stop() {
    if (!thread_.joinable()) return;
    stop_.store(1);
    wake_all(stop_);
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

// The kernel walks this thread's list, of one entry, when the thread ends: by then it is gone, unless
// the process has been killed. The list is in this process; only the word is in the segment.
void Lifeline::hold() {
    Word& own = segment_.seat(team_.rank()).alive;
    robust_list entry{};
    robust_list_head list{};
    entry.next = &list.list;
    list.list.next = &entry;
    list.futex_offset = reinterpret_cast<char*>(&own) - reinterpret_cast<char*>(&entry);
    if (syscall(SYS_set_robust_list, &list, sizeof list) != 0) return;
    own.store(static_cast<std::uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS);
    wake_all(own);
    watch();
    own.store(0);
    syscall(SYS_set_robust_list, nullptr, sizeof list);
    wake_all(own);
}

void Lifeline::watch() {
    const std::uint32_t next = (team_.rank() + 1) % team_.size();
    const Word& its = segment_.seat(next).alive;
    bool told = next == team_.rank();
    while (stop_.load() == 0) {
        const std::uint32_t seen = its.load();
        if (!told && is_dead(next)) {
            team_.abort("the process of rank " + std::to_string(next) + " of this host is gone");
            told = true;
        }
        const Waited both[] = {waited(stop_, 0), waited(its, seen)};
        if (syscall(kFutexWaitv, both, told ? 1 : 2, 0, nullptr, 0) < 0 && errno != EAGAIN &&
            errno != EINTR) {
            sleep_on(stop_, 0, kNap);  // such a system does not know how
        }
    }
}

}  // namespace nbelastic
