// Where a crash happened: on a wrong pointer, a division by zero or an abort, print the addresses of the calls that led
// there, as offsets into this library. `labs/native.py` turns them into a line of the source.
#pragma once

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

namespace crash_line {

inline void report(int number, siginfo_t*, void*) {
  void* frames[32];
  const int count = backtrace(frames, 32);
  Dl_info own{}, found{};
  dladdr(reinterpret_cast<void*>(&report), &own);
  for (int i = 0; i < count; ++i) {
    if (dladdr(frames[i], &found) && found.dli_fbase == own.dli_fbase) {
      const auto offset = static_cast<char*>(frames[i]) - static_cast<char*>(own.dli_fbase);
      std::fprintf(stderr, "crash at %s %lx\n", own.dli_fname, static_cast<unsigned long>(offset));
    }
  }
  std::fflush(stderr);
  signal(number, SIG_DFL);
  raise(number);
}

// A fiber's stack may be what overflowed: the handler has a separate one.
inline const bool installed = [] {
  static char stack[64 * 1024];
  stack_t other{};
  other.ss_sp = stack;
  other.ss_size = sizeof(stack);
  sigaltstack(&other, nullptr);
  struct sigaction action {};
  action.sa_sigaction = report;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(number, &action, nullptr);
  void* warm[1];
  backtrace(warm, 1);  // its first call loads a library, which a handler should not
  return true;
}();

}  // namespace crash_line
