//! libFuzzer's way into [`diy_mesh_proxy_fuzz::identity`]: `make fuzz TARGET=identity`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::identity(bytes));
