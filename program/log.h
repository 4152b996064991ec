// log.h - the log of a run (--log): a file with one line of JSON for each event, which dev/plot.py draws.
//
// A line has "kind", "step", "seconds" since the program was started, and the fields of its kind. At each
// start ./train first writes a line of the kind "settings". It has the date, all flags, and "run_started",
// the date of the run's first start: a run that is resumed keeps it, so that one file may hold several runs.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ranks.h"

namespace coat {

// The present date and time: "2026-03-31T15:38:02.123Z".
inline std::string utc_now() {
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

class RunLog {
public:
    // Opens the file; lines go behind what it has. Error if it cannot be written, or if another run writes
    // it.
    void open(const std::string& path) {
        path_ = path;
        file_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
        if (file_ < 0)
            throw Error("--log ", path, " cannot be written (", std::strerror(errno),
                        "); choose another file.");
        if (!std::filesystem::is_regular_file(path)) return;  // such as /dev/null
        if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
            throw Error("--log ", path, " is the log of another run that is going on; choose another file.");
        // A run that was killed, or had a full disk, may have left a part of a line.
        std::ifstream before(path, std::ios::binary);
        before.seekg(-1, std::ios::end);
        if (before && before.get() != '\n') write("\n");
    }

    // Writes a line; nothing if no file is open. A log that cannot be written any more, say because the disk
    // is full, does not end the run.
    void print(const char* kind, int64_t step, const nlohmann::ordered_json& fields) {
        using nlohmann::ordered_json;
        ordered_json line = {
            {"kind", kind}, {"step", step}, {"seconds", std::round(1e3 * (now() - start_)) / 1e3}};
        line.update(fields);
        write(line.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n");
    }

private:
    std::string path_;
    int file_ = -1;
    const double start_ = now();

    void write(const std::string& text) {
        if (file_ < 0 || ::write(file_, text.data(), text.size()) == ssize_t(text.size())) return;
        print_error("--log " + path_ + " cannot be written any more; the run continues without it.");
        ::close(file_);
        file_ = -1;
    }
};

}  // namespace coat
