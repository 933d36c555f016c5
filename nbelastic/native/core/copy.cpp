#include "copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nbelastic {
namespace {

constexpr std::size_t kLong = 2048;  // shorter ones go by vectors in any case
constexpr std::uintptr_t kPage = 4096;
constexpr std::uintptr_t kNear = 64;  // bytes; 32 are slow, as far as is known

struct alignas(16) Line {
    std::byte bytes[64];
};

std::uintptr_t number(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

bool is_a_little_ahead(const std::byte* to, const std::byte* from) {
    const std::uintptr_t ahead = (number(to) - number(from)) % kPage;
    return ahead > 0 && ahead < kNear;
}

void store_line(std::byte* to, const Line& line) {
    asm volatile("");  // else a compiler may take the loop around it for a memcpy
    std::memcpy(to, &line, sizeof line);
}

// `to` is at the beginning of a line.
void stream_line(std::byte* to, const Line& line) {
#if defined(__SSE2__)
    const auto* from = reinterpret_cast<const __m128i*>(&line);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, from[i]);
#else
    store_line(to, line);
#endif
}

// Copies whole lines, each by `store`; afterwards the arguments are what is left to copy.
template <class Store>
void copy_lines(std::byte*& to, const std::byte*& from, std::size_t& bytes, Store store) {
    for (; bytes >= sizeof(Line); bytes -= sizeof(Line)) {
        Line line;
        std::memcpy(&line, from, sizeof line);
        store(to, line);
        from += sizeof line;
        to += sizeof line;
    }
}

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    if (bytes > kLong && is_a_little_ahead(to, from)) copy_lines(to, from, bytes, store_line);
    std::memcpy(to, from, bytes);
}

void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    const std::size_t head = std::min(bytes, std::size_t{-number(to) % sizeof(Line)});
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    copy_lines(to, from, bytes, stream_line);
    std::memcpy(to, from, bytes);
#if defined(__SSE2__)
    _mm_sfence();  // such stores are not in order with others
#endif
}

}  // namespace nbelastic
