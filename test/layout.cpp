// layout.cpp - the sizes and the structure of the repository: limits of lines, and includes that run one way.
//
// A limit that is exceeded is no reason to raise it: something should become shorter first.
#include <doctest/doctest.h>

#include <cstdio>
#include <set>

#include "help/files.h"

using namespace coat::test;

namespace {

// The aims are 11,000 lines of core, 4,500 for the reading order of one step, and 8,500 of tests.
// Of DEV, 1,660 lines are the course: dev/coat.py, dev/exercises, dev/figures.py and what belongs to them. Of
// TESTS, 790 lines test it (test/dev).
constexpr size_t CORE = 11618, READING = 4110, TESTS = 9902, DEV = 5700, LARGEST_FILE = 1300, FUNCTION = 130;

bool ends(const std::string& s, const std::string& end) {
    return s.size() >= end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
}
bool is_source(const std::string& f) {
    return ends(f, ".h") || ends(f, ".cpp") || ends(f, ".cu") || ends(f, ".cuh");
}
bool in(const std::string& f, const char* folder) { return f.rfind(folder, 0) == 0; }

// The files under version control; none where this is no git checkout.
std::vector<std::string> tracked() {
    std::string text;
    if (FILE* p = popen("git ls-files 2>/dev/null", "r")) {
        char part[4096];
        while (const size_t n = std::fread(part, 1, sizeof part, p)) text.append(part, n);
        pclose(p);
    }
    return lines_of(text);
}

// The first line of each function that is longer than `limit`: from a line that ends with "{" to its "}".
std::vector<std::string> long_functions(const std::vector<std::string>& lines, size_t limit) {
    std::vector<std::string> found;
    for (size_t i = 0; i < lines.size(); i++) {
        const std::string& line = lines[i];
        const size_t indent = line.find_first_not_of(' ');
        if (indent == std::string::npos || indent > 4 || !ends(line, "{")) continue;
        if (line.find('(') == std::string::npos) continue;
        auto closes = [&](const std::string& l) {
            const size_t first = l.find_first_not_of(' ');
            return first != std::string::npos && first <= indent && l[first] == '}';
        };
        size_t j = i + 1;
        while (j < lines.size() && !closes(lines[j])) j++;
        if (j < lines.size() && j - i + 1 > limit) found.push_back(line);
    }
    return found;
}

}  // namespace

TEST_CASE("layout: lines, columns, functions and entries at the top stay within their limits") {
    size_t core = 0, comments = 0, tests = 0, dev = 0;
    std::set<std::string> top;
    const std::vector<std::string> files = tracked();
    if (files.empty()) return;  // the sources without git
    for (const std::string& f : files) {
        if (f[0] != '.') top.insert(f.substr(0, f.find('/')));
        if (in(f, "dev/") && (is_source(f) || ends(f, ".md") || ends(f, ".py") || ends(f, ".sh")))
            dev += lines_of(read_file(f)).size();
        if (!is_source(f)) continue;
        INFO(f);
        const std::vector<std::string> lines = lines_of(read_file(f));
        if (in(f, "test/")) tests += lines.size();
        if (in(f, "test/") || in(f, "dev/")) continue;
        core += lines.size();
        CHECK(lines.size() <= LARGEST_FILE);
        for (const std::string& line : lines) {
            CHECK_MESSAGE(line.size() <= 110, line);
            const size_t first = line.find_first_not_of(' ');
            comments += first != std::string::npos && line.compare(first, 2, "//") == 0;
        }
        for (const std::string& function : long_functions(lines, FUNCTION)) CHECK_MESSAGE(false, function);
    }
    CHECK(core <= CORE);
    CHECK(comments * 100 <= core * 14);
    CHECK(tests <= TESTS);
    CHECK(dev <= DEV);
    CHECK(top.size() <= 16);
}

TEST_CASE("layout: the files of the reading order in the README have at most READING lines") {
    const std::string readme = read_file("README.md");
    const size_t start = readme.find("<!-- reading -->");
    REQUIRE(start != std::string::npos);
    size_t total = 0;
    int files = 0;
    // rows "| 1 | `coat.h` | ... |"
    for (const std::string& line : lines_of(readme.substr(start, readme.find("\n\n", start + 20) - start))) {
        for (size_t at = line.find('`'); at != std::string::npos; at = line.find('`', at)) {
            const size_t end = line.find('`', at + 1);
            total += lines_of(read_file(line.substr(at + 1, end - at - 1))).size();
            files++;
            at = end + 1;
        }
    }
    CHECK(files >= 8);
    CHECK(total <= READING);
}

TEST_CASE("layout: includes run one way") {
    // A file includes files of its own level and of those below it.
    const std::vector<std::vector<std::string>> levels = {{"coat.h", "program/error.h"},
                                                          {"program/model.h", "program/ranks", "data/"},
                                                          {"program/plan", "program/flags"},
                                                          {"reference.", "gpu/", "coat.cu", "adamw.cu"},
                                                          {"model.cu"},
                                                          {"program/train.cpp"}};
    auto level = [&](const std::string& f) {
        for (size_t i = 0; i < levels.size(); i++)
            for (const std::string& name : levels[i])
                if (in(f, name.c_str())) return static_cast<int>(i);
        FAIL("a file that no level names: " << f);
        return 0;
    };
    for (const std::string& f : tracked()) {
        if (!is_source(f) || in(f, "test/") || in(f, "dev/")) continue;
        const std::string folder = f.find('/') == std::string::npos ? "" : f.substr(0, f.find('/') + 1);
        for (const std::string& line : lines_of(read_file(f))) {
            if (line.rfind("#include \"", 0) != 0) continue;
            std::string path = line.substr(10, line.rfind('"') - 10);
            path = in(path, "../") ? path.substr(3) : folder + path;
            CHECK_MESSAGE(level(path) <= level(f), f << " includes " << path);
            if (in(f, "reference.")) CHECK_MESSAGE(!in(path, "gpu/"), f << " includes " << path);
        }
    }
}
