// data/json.h - one reader for every JSON file (json.cpp).
#pragma once
#include <cstdint>
#include <string>
#include <nlohmann/json.hpp>

namespace coat {

// The JSON object in a text. The JSON library reads nested values iteratively, but it prints, copies and compares them
// recursively; and its objects take many times the memory of the text. So depth and number of values are limited first.
// On success *why is empty; else it says what is wrong ("is not a JSON object") and the result has no meaning.
nlohmann::json parse_json(const void* text, int64_t bytes, std::string* why, int64_t most_values = 5'000'000);

}  // namespace coat
