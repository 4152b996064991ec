// walk.cpp - dev/WALK.md: every quotation of a source file is found in that file, and a section is a screen.
#include <doctest/doctest.h>

#include <regex>
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

TEST_CASE("WALK.md: a section has at most 150 words; pictures are there, and have at most 60 kB") {
    std::istringstream walk(read_file("dev/WALK.md"));
    std::string line, section;
    size_t lines = 0, words = 0;
    bool code = false;
    while (std::getline(walk, line)) {
        lines++;
        if (line.rfind("```", 0) == 0) code = !code;
        if (line.rfind("## ", 0) == 0) section = line, words = 0;
        else if (!code && line.rfind("![", 0) != 0 && line.rfind("|", 0) != 0 && line.rfind("    ", 0) != 0) {
            std::istringstream in(line);
            for (std::string word; in >> word;) words++;
        }
        CHECK_MESSAGE(words <= 150, section);
    }
    CHECK(lines <= 350);
    size_t pictures = 0;
    for (const std::string page : {"README.md", "dev/WALK.md"}) {
        const std::string text = read_file(page);
        for (size_t at = text.find(".svg)"); at != std::string::npos; at = text.find(".svg)", at + 1)) {
            const size_t begin = text.rfind('(', at) + 1;
            const fs::path path = fs::path(page).parent_path() / text.substr(begin, at + 4 - begin);
            CAPTURE(path.string());
            const size_t size = read_file(path).size();
            CHECK((size > 0 && size <= 60000));
            pictures++;
        }
    }
    CHECK(pictures >= 7);
}

TEST_CASE("WALK.md: the tests that it names exist") {
    const std::regex space("\\s+"), joined("\"\\s*\n\\s*\""), named("Tests?: `([^`]+)`(, `([^`]+)`)?");
    std::string sources;
    for (const auto& entry : fs::recursive_directory_iterator("test"))
        if (entry.is_regular_file()) sources += std::regex_replace(read_file(entry.path()), joined, "");
    const std::string walk = std::regex_replace(read_file("dev/WALK.md"), space, " ");
    size_t tests = 0;
    for (std::sregex_iterator match(walk.begin(), walk.end(), named), end; match != end; ++match)
        for (const std::string& name : {(*match)[1].str(), (*match)[3].str()}) {
            if (name.empty()) continue;
            // A macro may put the place before the name: "gpu: ranks: ". After the last one, at is npos + 2
            // = 1.
            bool found = false;
            for (size_t at = 0; !found && at != 1; at = name.find(": ", at) + 2)
                found = contains(sources, "\"" + name.substr(at) + "\"");
            CHECK_MESSAGE(found, name);
            tests++;
        }
    CHECK(tests >= 12);
}
