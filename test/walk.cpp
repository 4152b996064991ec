// walk.cpp - dev/WALK.md: every quotation of a source file is found in that file.
#include <doctest/doctest.h>

#include <sstream>

#include "help/files.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("WALK.md: every quoted line is in its file, in the same order") {
    auto trimmed = [](const std::string& line) {
        const size_t first = line.find_first_not_of(' ');
        return first == std::string::npos ? "" : line.substr(first);
    };
    std::istringstream walk(read_file("dev/WALK.md"));
    std::istringstream source;
    std::string file, line, found;
    bool gap = false;  // lines were left out before this one
    int lines = 0;
    while (std::getline(walk, line)) {
        const bool fence = line.rfind("```", 0) == 0;
        if (fence) file = line.rfind("```cpp ", 0) == 0 ? line.substr(7) : "";
        if (fence && !file.empty()) source = std::istringstream(read_file(file));
        if (fence || trimmed(line) == "// ...") gap = true;
        else if (!file.empty() && !trimmed(line).empty()) {
            CAPTURE(file);
            CAPTURE(line);
            bool found_line = false, over = false;
            while (!found_line && !over && std::getline(source, found)) {
                found_line = trimmed(found) == trimmed(line);
                over = !gap && !trimmed(found).empty();
            }
            CHECK(found_line);
            gap = false;
            lines++;
        }
    }
    CHECK(lines > 40);
}
