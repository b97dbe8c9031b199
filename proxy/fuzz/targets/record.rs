//! libFuzzer's way into [`diy_mesh_proxy_fuzz::record`]: `make fuzz TARGET=record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::record(bytes));
