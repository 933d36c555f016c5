#define NBELASTIC_ISA "avx512"
#define NBELASTIC_KERNELS kernels_avx512
#include "loops.inc"
