//! Compiles the .proto files with protox, which does not require protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["mesh/v1/mesh.proto", "echo/v1/echo.proto"];
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        // As derived for messages without lists of messages.
        .message_attribute("HeaderModifier", "#[derive(Eq, Hash)]")
        .compile_fds(descriptors)?;
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}
