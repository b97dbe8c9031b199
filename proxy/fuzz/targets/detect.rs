//! libFuzzer's way into [`diy_mesh_proxy_fuzz::detect`]: `make fuzz TARGET=detect`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::detect(bytes));
