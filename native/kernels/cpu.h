// What this CPU and operating system can run.
#pragma once

namespace caudal {

// AVX2, FMA, F16C and BMI2, with the operating system saving the wide registers.
bool cpu_has_avx2();
// The same with AVX-512 F, BW, DQ, VL and VNNI.
bool cpu_has_avx512_vnni();
// The dot product instructions of 64-bit ARM (FEAT_DotProd).
bool cpu_has_dotprod();
// The 8-bit matrix instructions of 64-bit ARM (FEAT_I8MM).
bool cpu_has_i8mm();

}  // namespace caudal
