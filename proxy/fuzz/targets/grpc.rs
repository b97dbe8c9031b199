//! libFuzzer's way into [`diy_mesh_proxy_fuzz::grpc`]: `make fuzz TARGET=grpc`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::grpc(bytes));
