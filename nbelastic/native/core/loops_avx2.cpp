#define NBELASTIC_ISA "avx2"
#define NBELASTIC_KERNELS kernels_avx2
#include "loops.inc"
