// Exits with the highest level that this machine runs, for CMakeLists.txt.
extern "C" int modulm_highest_level();

int main() { return modulm_highest_level(); }
