// ladders.cpp - what dev/ladders has for readers without a GPU: banks.py, which counts sectors and clocks, the
// exercises of layouts.py, and the page on which make read shows each ladder. The kernels are not run here.
#include "../help/program.h"

#include <regex>

using namespace coat;
using namespace coat::test;

// The answers on paper at the end of dev/ladders/quantize_transpose.cu, and what its rungs 4 to 7 read and
// write.
PYTHON_TEST_CASE("banks.py: it counts what the exercises on paper ask") {
    const Folder folder;
    auto run = [&](const std::string& access) {
        CAPTURE(access);
        const Ended ended = python(folder, "-m banks " + access);
        require_success(ended);
        return ended.out;
    };
    auto prints = [&](const std::string& access, int sectors, int clocks) {
        CAPTURE(access);
        const std::string out = run(access);
        CHECK(contains(out, concat("if the array lies in memory: ", sectors, " sectors of 32 bytes\n")));
        CHECK(contains(
            out, concat("if it lies in shared memory: ", clocks, clocks == 1 ? " clock," : " clocks,")));
    };
    prints("lane", 4, 1);
    prints("'lane + 1'", 5, 1);
    prints("'8 * lane'", 32, 8);
    prints("'31 - lane'", 4, 1);
    prints("'2 * lane'", 8, 2);
    prints("'32 * lane'", 32, 32);
    prints("'33 * lane'", 32, 1);
    prints("'lane // 4'", 1, 1);
    prints("'32 * lane + (lane ^ 5)'", 32, 1);
    prints("'36 * lane' --bytes 1", 32, 1);
    prints("'33 * lane' --bytes 1", 32, 1);
    prints("'33 * lane + 1' --bytes 1", 32, 2);
    prints("'lane % 4 + 512 * (lane // 4)' --bytes 1", 8, 8);
    prints("'68*(lane//8) + 8*(lane%8)' --bytes 1", 9, 2);
    prints("'65*(lane//8) + 8*(lane%8)' --bytes 1", 8, 2);
    prints("'65*8*(lane%8) + lane//8' --bytes 1", 8, 1);
    prints("lane --bytes 16", 16, 4);
    prints("'256*(lane%16) + 2*(lane//16)'", 16, 16);
    prints("'256*(lane%16) + (2*(lane//16) ^ 2*(lane%16) ^ lane//16)'", 16, 1);
    CHECK(contains(run("'32 * lane'"), "bank  0   word 0: lane 0   word 32: lane 1"));
    CHECK(contains(run("'random(128)'"), "2.8 clocks"));
}

// The functions of layouts.py as the rungs compute them.
static const std::map<std::string, std::string> SOLVED = {
    {"tile_byte", "lambda row, column: 36 * row + column"},
    {"chunk_loaded", "lambda thread, step: (thread // 8 + 32 * step, thread % 8 * 8)"},
    {"chunk_stored", "lambda thread, step: (thread // 8 + 32 * step, thread % 8 * 8)"},
    {"slot", "lambda word, across: word ^ 2 * across ^ word // 2 % 2"},
    {"first_element", "lambda lane: 8 * lane"},
    {"partner", "lambda lane, round: lane ^ 2 ** round"},
    {"field_of_lane", "lambda lane: (lane % 16 // 4 * 2 + lane // 16, lane % 4)"},
    {"first_number", "lambda lane, load: 8 * (4 * load + lane % 4)"}};

// What the check says of these functions: the lines that it prints.
static std::vector<std::string> checked(const std::map<std::string, std::string>& functions, bool all_right) {
    const Folder folder;
    std::string answers = "import layouts, check_layouts\n";
    for (const auto& [name, function] : functions) answers += concat("layouts.", name, " = ", function, "\n");
    folder.write("answers.py", answers + "check_layouts.check(layouts)\n");
    const Ended ended = python(folder, "answers.py");
    INFO(answers << ended.out << ended.error);
    CHECK(ended.code == (all_right ? 0 : 1));
    return lines_of(ended.out);
}

PYTHON_TEST_CASE("layouts.py: nothing is written at first; and what the rungs do passes") {
    for (const std::string& line : checked({}, true)) CHECK(line.ends_with(": not written yet"));
    const std::vector<std::string> lines = checked(SOLVED, true);
    CHECK(lines.size() == 8);
    for (const std::string& line : lines) CHECK(line.ends_with(": passed"));
}

// Each row is a mistake: a function in place of the right one, and what the check says of it.
PYTHON_TEST_CASE("layouts.py: each mistake is named") {
    const struct {
        std::string name, function, said;
    } mistakes[] = {
        {"tile_byte", "lambda row, column: 32 * row + column",
         "wrong: reading column 0 takes 8 clocks: for instance lanes 0 and 4 need words 0 and 32, both in "
         "bank 0"},
        {"tile_byte", "lambda row, column: 33 * row + column",
         "wrong: reading column 1 takes 2 clocks: for instance lanes 0 and 31 need words 0 and 256, both in "
         "bank 0"},
        {"tile_byte", "lambda row, column: 31 * row + column", "wrong: (0, 31) and (1, 0) both have byte 31"},
        {"tile_byte", "lambda row, column: 68 * row + column",
         "wrong: tile_byte(30, 8) returns 2048, which is outside 0 to 2047"},
        {"tile_byte", "lambda row, column: row / 2",
         "wrong: tile_byte(0, 0) returns 0.0: an integer is wanted"},
        {"tile_byte", "lambda row, column: 33 * rwo + column",
         "wrong: it raises NameError: name 'rwo' is not defined"},
        {"partner", "lambda lane, round: lane ^ 2 ** round if lane < 16 else None",
         "wrong: partner(16, 0) returns None: an integer is wanted"},
        {"chunk_loaded", "lambda thread, step: (thread % 64, thread // 64 * 8 + 32 * step)",
         "wrong: step 0 of warp 0 wants 32 sectors, where 16 are enough"},
        {"chunk_loaded", "lambda thread, step: (thread // 8, thread % 8 * 8)",
         "wrong: thread 0 in step 0 and thread 0 in step 1 both have the eight elements that begin at (0, "
         "0)"},
        {"chunk_loaded", "lambda thread, step: (thread // 8 + 32 * step, thread % 8)",
         "wrong: chunk_loaded(1, 0) returns (0, 1): 1 is no multiple of 8"},
        {"chunk_loaded", "lambda thread, step: 8 * thread",
         "wrong: chunk_loaded(0, 0) returns 0: two integers are wanted"},
        {"chunk_stored", "lambda thread, step: (thread % 64, thread // 64 * 8 + 32 * step)",
         "wrong: step 0 of warp 0 wants 32 sectors, where 8 are enough"},
        {"slot", "lambda word, across: word",
         "wrong: storing the upper words of warp 0 takes 16 clocks: for instance lanes 0 and 1 need words 0 "
         "and 256, both in bank 0"},
        {"slot", "lambda word, across: word ^ 2 * across",
         "wrong: storing the upper words of warp 0 takes 2 clocks: for instance lanes 1 and 16 need words "
         "258 and 2, both in bank 2"},
        {"slot", "lambda word, across: word & across",
         "wrong: word 0 and word 1 both have slot 0 where across is 0"},
        {"slot", "lambda word, across: (word + 2 * across) % 32",
         "wrong: words 0 and 2 of a piece have slots 2 and 4 where across is 1"},
        {"first_element", "lambda lane: 4 * lane",
         "wrong: first_element(1) returns 4, which is no multiple of 8"},
        {"first_element", "lambda lane: lane % 2 * 128 + lane // 2 * 8",
         "wrong: lanes 0 to 15 have elements of both spans"},
        {"partner", "lambda lane, round: lane ^ (round + 1)",
         "wrong: lane 8 never learns of the number of lane 0"},
        {"partner", "lambda lane, round: lane ^ 2 ** (round + 1)",
         "wrong: lane 0 has a number of the other half of the warp"},
        {"partner", "lambda lane, round: (lane + 2 ** round) % 32",
         "wrong: lane 1 has a number of the other half of the warp"},
        {"field_of_lane", "lambda lane: (lane // 4, lane % 4)",
         "wrong: lane 4 has a field of span 1, which the other half updates"},
        {"field_of_lane", "lambda lane: (lane % 8, lane // 8)",
         "wrong: lane 1 has a field of span 1, which the other half updates"},
        {"first_number", "lambda lane, load: 32 * (lane % 4) + 8 * load", "wrong: load 0 wants 4 sectors"},
    };
    for (const auto& [name, function, said] : mistakes) {
        CAPTURE(name);
        CAPTURE(function);
        std::map<std::string, std::string> functions = SOLVED;
        functions[name] = function;
        size_t passed = 0;
        bool named = false;
        for (const std::string& line : checked(functions, false)) {
            CAPTURE(line);
            passed += line.ends_with(": passed");
            named |= contains(line, name) && contains(line, said);
        }
        CHECK(passed == 7);
        CHECK(named);
    }
}

// Each rung of a ladder asks the reader to predict, and its answer is folded directly below that.
PYTHON_TEST_CASE("make read: each rung of the ladders has its answer below its question") {
    const Folder folder;
    require_success(python(folder, "'" + fs::absolute("dev/read.py").string() + "' read.html"));
    const std::string page = read_file(folder / "ladders.html");
    for (const char* words :
         {"Eight codes that one sum needs", "Rung 5. Red", "Rung 6. Red", "The same for all 16"})
        CHECK_MESSAGE(contains(page, concat("<img alt=\"", words)), words);
    for (const auto& [ladder, rungs] :
         {std::pair{"quantize_transpose", 7}, {"adamw", 8}, {"norm_to_fp8", 6}, {"attention", 6}})
        for (int rung = 1; rung <= rungs; rung++) {
            INFO(ladder << " " << rung);
            const size_t at = page.find(concat("<section id=\"", ladder, "-rung-", rung, "\">"));
            REQUIRE(at != page.npos);
            const std::string section = page.substr(at, page.find("</section>", at) - at);
            const std::regex folded(
                "<p class=try><b>Predict:</b>[^\n]*</p><details><summary>Answer</summary>");
            CHECK(std::regex_search(section, folded));
            CHECK(contains(section, "measured "));
            CHECK(contains(section, concat("launch_rung", rung)));
        }
}
