//! libFuzzer's way into [`diy_mesh_proxy_fuzz::hello`]: `make fuzz TARGET=hello`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::hello(bytes));
