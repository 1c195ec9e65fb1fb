//! Which source a measurement is of.

use std::path::Path;

/// The commit that the command was built from: what the build was told by `ROLLOUT_COMMIT`, or else that of the repository it
/// was built in, as far as it is still there. `None` where neither is known.
pub(in crate::cli) fn commit() -> Option<String> {
    let told = option_env!("ROLLOUT_COMMIT").filter(|commit| !commit.is_empty());
    told.map(String::from)
        .or_else(|| of_repository(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../.git")))
}

/// The commit that is checked out, from git's own files: git itself need not be there.
fn of_repository(git: &Path) -> Option<String> {
    // A worktree's is a file that names a folder, whose `commondir` names the repository's.
    let folder = match std::fs::read_to_string(git) {
        Ok(text) => git.parent()?.join(text.strip_prefix("gitdir: ")?.trim()),
        Err(_) => git.to_path_buf(),
    };
    let head = std::fs::read_to_string(folder.join("HEAD")).ok()?;
    let Some(name) = head.trim().strip_prefix("ref: ") else {
        return is_commit(head.trim()).then(|| head.trim().to_string());
    };
    let common = match std::fs::read_to_string(folder.join("commondir")) {
        Ok(relative) => folder.join(relative.trim()),
        Err(_) => folder,
    };
    let found = match std::fs::read_to_string(common.join(name)) {
        Ok(commit) => commit.trim().to_string(),
        Err(_) => {
            let packed = std::fs::read_to_string(common.join("packed-refs")).ok()?;
            let line = packed.lines().find(|line| line.ends_with(&format!(" {name}")))?;
            line.split(' ').next()?.to_string()
        }
    };
    is_commit(&found).then_some(found)
}

fn is_commit(text: &str) -> bool {
    text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_found_in_repositories_and_worktrees() {
        let dir = tempfile::tempdir().unwrap();
        let git = dir.path().join("repository/.git");
        let write = |path: &Path, text: &str| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let [a, b, c] = ["a", "b", "c"].map(|digit| digit.repeat(40));
        assert_eq!(of_repository(&git), None);
        write(&git.join("HEAD"), "ref: refs/heads/main\n");
        write(
            &git.join("packed-refs"),
            &format!("# pack-refs\n{a} refs/heads/main\n{b} refs/heads/side\n"),
        );
        assert_eq!(of_repository(&git).as_ref(), Some(&a));
        write(&git.join("refs/heads/main"), &format!("{c}\n"));
        assert_eq!(of_repository(&git).as_ref(), Some(&c));
        write(&git.join("worktrees/side/HEAD"), "ref: refs/heads/side\n");
        write(&git.join("worktrees/side/commondir"), "../..\n");
        let worktree = dir.path().join("side/.git");
        write(&worktree, "gitdir: ../repository/.git/worktrees/side\n");
        assert_eq!(of_repository(&worktree).as_ref(), Some(&b));
        write(&git.join("HEAD"), &format!("{b}\n"));
        assert_eq!(of_repository(&git).as_ref(), Some(&b));
        write(&git.join("HEAD"), "nonsense");
        assert_eq!(of_repository(&git), None);
    }
}
