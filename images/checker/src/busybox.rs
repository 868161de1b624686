//! The guest's other program.

use std::process::Command;

/// Runs one of its commands, which must succeed.
pub(crate) fn busybox(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("/bin/busybox")
        .args(arguments)
        .output()
        .map_err(|error| format!("busybox: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let words = String::from_utf8_lossy(&output.stderr);
            let words = words.trim().replace('\n', "; ");
            Err(format!(
                "{}: {}: {words}",
                arguments.join(" "),
                output.status
            ))
        }
    }
}
