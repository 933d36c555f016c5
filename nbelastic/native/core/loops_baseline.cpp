#if defined(__aarch64__)
#define NBELASTIC_ISA "neon"
#else
#define NBELASTIC_ISA "baseline"
#endif
#define NBELASTIC_KERNELS kernels_baseline
#include "loops.inc"
