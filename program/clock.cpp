// program/clock.cpp - durations, dates, and the length of a minute (clock.h).
#include "clock.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace coat {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string utc_now() {
    using namespace std::chrono;
    const auto since_1970 = system_clock::now().time_since_epoch();
    const std::time_t seconds = duration_cast<std::chrono::seconds>(since_1970).count();
    const int64_t milliseconds = duration_cast<std::chrono::milliseconds>(since_1970).count() % 1000;
    std::tm utc{};
    ::gmtime_r(&seconds, &utc);
    char text[32], date[64];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    std::snprintf(date, sizeof date, "%s.%03ldZ", text, milliseconds);
    return date;
}

double seconds_per_minute() {
    const char* const text = std::getenv("COAT_MINUTE");
    return text ? std::atof(text) : 60;
}

}  // namespace coat
