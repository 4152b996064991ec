// program/log.cpp - writes the log of a run (log.h).
#include "log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "../common/text.h"

namespace coat {

void RunLog::open(const std::string& path) {
    path_ = path;
    file_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0)
        throw Error("--log ", path, " cannot be written (", std::strerror(errno), "); choose another file.");
    if (!std::filesystem::is_regular_file(path)) return;  // such as /dev/null
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        throw Error("--log ", path, " is the log of another run that is going on; choose another file.");
    // A run that was killed, or had a full disk, may have left a part of a line.
    std::ifstream before(path, std::ios::binary);
    before.seekg(-1, std::ios::end);
    if (before && before.get() != '\n') write("\n");
}

void RunLog::write_line(const char* kind, int64_t step, const ordered_json& fields) {
    ordered_json line = {
        {"kind", kind}, {"step", step}, {"seconds", std::round(1e3 * (now() - start_)) / 1e3}};
    line.update(fields);
    write(line.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n");
}

void RunLog::write(const std::string& text) {
    if (file_ < 0 || ::write(file_, text.data(), text.size()) == ssize_t(text.size())) return;
    print_error("--log " + path_ + " cannot be written any more; the run continues without it.");
    ::close(file_);
    file_ = -1;
}

}  // namespace coat
