#include "futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace nbelastic {

void sleep_on(Word& word, std::uint32_t expected, std::chrono::nanoseconds limit) noexcept {
    timespec time{};
    time.tv_sec = static_cast<std::time_t>(limit.count() / 1'000'000'000);
    time.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
    syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void wake_all(Word& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace nbelastic
