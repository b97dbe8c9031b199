//! libFuzzer's way into [`diy_mesh_proxy_fuzz::authorization`]: `make fuzz TARGET=authorization`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::authorization(bytes));
