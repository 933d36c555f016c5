#include "reduce.hpp"

#include <cstdlib>
#include <cstring>

namespace nbelastic {
namespace {

bool wanted(const Kernels* some) {
    const char* name = std::getenv("NBELASTIC_ISA");  // to compare them, or to rule one out
    return name == nullptr || std::strcmp(name, some->name) == 0;
}

const Kernels* best() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512 && wanted(kernels_avx512())) return kernels_avx512();
    if (avx2 && wanted(kernels_avx2())) return kernels_avx2();
#endif
    return kernels_baseline();
}

}  // namespace

const Kernels& kernels() noexcept {
    static const Kernels& chosen = *best();
    return chosen;
}

}  // namespace nbelastic
