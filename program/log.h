// program/log.h - the log of a run (--log, log.cpp): a file with one line of JSON for each event, which
// dev/plot.py draws.
//
// A line has "kind", "step", "seconds" since the program was started, and the fields of its kind. At each
// start ./train first writes a line of the kind "settings". It has the date, all flags, and "run_started",
// the date of the run's first start: a run that is resumed keeps it, so that one file may hold several runs.
#pragma once
#include <cstdint>
#include <string>

#include "../data/json.h"
#include "clock.h"

namespace coat {

class RunLog {
public:
    // Opens the file; lines go after what it has. Error if it cannot be written, or if another run writes
    // it.
    void open(const std::string& path);
    // Writes a line; nothing if no file is open. A log that cannot be written any more, say because the disk
    // is full, does not end the run.
    void write_line(const char* kind, int64_t step, const ordered_json& fields);

private:
    void write(const std::string& text);

    std::string path_;
    int file_ = -1;
    const double start_ = now();
};

}  // namespace coat
