// Waiting in the kernel for a word in shared memory to change.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace nbelastic {

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

// Sleeps while `word` is `expected`, for at most `limit`; may return early.
void sleep_on(Word& word, std::uint32_t expected, std::chrono::nanoseconds limit) noexcept;

// Wakes all who sleep on `word`, in whichever process.
void wake_all(Word& word) noexcept;

// Tells the processor that this is a loop that waits.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace nbelastic
