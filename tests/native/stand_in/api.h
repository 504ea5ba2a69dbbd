// How the stand-in's functions begin: counting, failing as told, asking for a context.
#pragma once

#include "gpu.h"

namespace stand_in {

inline std::map<std::string, int> calls, live;
inline thread_local std::vector<void*> current;  // the stack of contexts

// FAIL="cuInit=100,cuStreamQuery=700@3": that code, from the third call on.
inline int enter(const char* symbol) {
    const int count = ++calls[symbol];
    for (const std::string& failure : parts(settings.text("FAIL"), ',')) {
        const auto equals = failure.find('='), at = failure.find('@');
        if (failure.substr(0, equals) != symbol) continue;
        if (at == std::string::npos || count >= std::stoi(failure.substr(at + 1)))
            return std::stoi(failure.substr(equals + 1));
    }
    return kOk;
}

inline int enter_context(const char* symbol) {
    if (int failed = enter(symbol)) return failed;
    return current.empty() ? 201 : sticky;
}

}  // namespace stand_in

#define ENTER(function, symbol)                         \
    std::lock_guard<std::recursive_mutex> locked(lock); \
    if (int failed = function(symbol)) return failed
#define OF_STREAM(stream) \
    if (!streams.count(stream)) return 400
