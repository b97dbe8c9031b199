//! libFuzzer's way into [`diy_mesh_proxy_fuzz::trace`]: `make fuzz TARGET=trace`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::trace(bytes));
