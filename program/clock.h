// program/clock.h - the time: for durations, for dates, and for waiting (clock.cpp).
#pragma once
#include <string>

namespace coat {

// The time in seconds, for durations and deadlines. It counts from an arbitrary moment.
double now();

// The present date and time: "2026-03-31T15:38:02.123Z".
std::string utc_now();

// 60 seconds, for all waits that last minutes. Tests cannot wait so long: they set another length with the
// variable COAT_MINUTE.
double seconds_per_minute();

}  // namespace coat
