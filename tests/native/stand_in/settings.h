// What the stand-in is to be like: settings from STAND_IN_<NAME> in the environment, or set at run time by a test.
#pragma once

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace stand_in {

struct Settings {
    std::map<std::string, std::string> set;

    std::string text(const std::string& name, const std::string& fallback = "") const {
        const auto found = set.find(name);
        if (found != set.end()) return found->second;
        const char* value = std::getenv(("STAND_IN_" + name).c_str());
        return value ? value : fallback;
    }
    long number(const std::string& name, long fallback) const {
        const std::string value = text(name);
        return value.empty() ? fallback : std::strtol(value.c_str(), nullptr, 0);
    }
};

inline std::vector<std::string> parts(const std::string& text, char separator) {
    std::vector<std::string> found;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);)
        if (!part.empty()) found.push_back(part);
    return found;
}

// Whether "0x10,0x20-0x30" covers a number; "all" covers every one.
inline bool covers(const std::string& ranges, long number) {
    for (const std::string& range : parts(ranges, ',')) {
        if (range == "all") return true;
        char* end;
        const long first = std::strtol(range.c_str(), &end, 0);
        const long last = *end == '-' ? std::strtol(end + 1, nullptr, 0) : first;
        if (first <= number && number <= last) return true;
    }
    return false;
}

inline bool lists(const std::string& names, const std::string& name) {
    for (const std::string& listed : parts(names, ','))
        if (listed == name || listed == "all") return true;
    return false;
}

}  // namespace stand_in
