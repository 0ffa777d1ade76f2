# Cross-compiling for Arm: cmake -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake, with Debian's compiler
# (apt-get install g++-aarch64-linux-gnu).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
