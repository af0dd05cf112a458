// CPU kernel files (*_cpu.cc) are compiled once for each instruction set. Everything in them lies in an anonymous
// namespace except the launchers, whose names end in the instruction set: ORTPLUGINS_CPU_NAME(launch_softmax_cpu) is
// launch_softmax_cpu_avx2 in the AVX2 object.
#pragma once

#ifndef ORTPLUGINS_CPU_ISA
#define ORTPLUGINS_CPU_ISA generic
#endif

#define ORTPLUGINS_CPU_CONCAT_(name, isa) name##_##isa
#define ORTPLUGINS_CPU_CONCAT(name, isa) ORTPLUGINS_CPU_CONCAT_(name, isa)
#define ORTPLUGINS_CPU_NAME(name) ORTPLUGINS_CPU_CONCAT(name, ORTPLUGINS_CPU_ISA)
